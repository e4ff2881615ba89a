"""Finds the CANN functions that torch_npu needs and writes stand-ins for those without a body.

Every function that the torch_npu libraries import from CANN is one of: written by hand (the C++ beside
this file), on the allow list ``native/allowed.txt`` (does nothing, reports success), or a generated
function that throws when called and names itself. Functions that torch_npu looks up by name at run time
and does not find here make torch_npu itself raise "Failed to find function NAME".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

# Libraries of CANN that torch_npu and torchair link against or open by name. All of them become empty
# libraries that need the one runtime library, so that its state exists once. libopapi stays absent: it
# holds the fused kernels, and torch_npu reports a missing one by name.
SONAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
    "libascend_hal.so",
    "libhcomm.so",
    "libruntime.so",
)
_C_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def imported(library: Path) -> set[str]:
    """Names that an ELF library takes from others without a symbol version.

    glibc and libstdc++ version most symbols, so those drop out; CANN's, torch's and Python's stay.
    """
    with library.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        assert isinstance(table, SymbolTableSection), library
        names = set()
        for index, symbol in enumerate(table.iter_symbols()):
            weak = symbol["st_info"]["bind"] == "STB_WEAK"
            if symbol["st_shndx"] != "SHN_UNDEF" or weak or not symbol.name:
                continue
            if isinstance(versions, GNUVerSymSection):
                version = versions.get_symbol(index)["ndx"]
                if version not in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL"):
                    continue
            names.add(symbol.name)
        return names


def exported(library: Path) -> set[str]:
    """Names that an ELF library defines for others."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        table = elf.get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection), library
        return {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"}


def needed_from_cann(torch_npu: Path, torch: Path) -> set[str]:
    """CANN names that the libraries under ``torch_npu`` import and neither they nor ``torch`` define."""
    own = sorted(torch_npu.rglob("*.so"))
    if not own:
        raise FileNotFoundError(f"no shared libraries under {torch_npu}")
    wanted = set().union(*(imported(path) for path in own if _links_cann(path)))
    others = [*own, *sorted((torch / "lib").glob("*.so*")), *_system_libraries()]
    known = set().union(*(exported(path) for path in others))
    return {name for name in wanted - known if not name.startswith(("Py", "_Py"))}


def _system_libraries() -> set[Path]:
    """The C library as this process has it; not every symbol that others take from it carries a version."""
    maps = Path("/proc/self/maps").read_text().split()
    return {Path(word) for word in maps if re.search(r"/(lib(c|m|pthread|dl|rt)[.-]|ld-linux)[^/]*$", word)}


def _links_cann(library: Path) -> bool:
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection), library
        needed = {tag.needed for tag in section.iter_tags("DT_NEEDED")}
    return not needed.isdisjoint(SONAMES)


def allowed(path: Path) -> dict[str, str]:
    """The allow list: name to reason."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason for name, reason in (line.split(maxsplit=1) for line in lines)}


def source(wanted: Iterable[str], written: set[str], allow: dict[str, str]) -> str:
    """C++ text with a stand-in for each wanted or allowed name that is not already ``written``."""
    lines = ['extern "C" {', "int vnpu_missing(const char* symbol);"]
    for name in sorted({*wanted, *allow} - written):
        assert _C_NAME.match(name), name
        body = "return 0;" if name in allow else f'return vnpu_missing("{name}");'
        lines.append(f"int {name}() {{ {body} }}")
    return "\n".join([*lines, "}", ""])
