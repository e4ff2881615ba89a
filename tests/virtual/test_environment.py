"""An environment has a virtual NPU after ``enable`` and only then."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from npufleet.kernels.virtual import environment

from .process import attempt, run

COMMAND = "from npufleet.kernels.virtual.__main__ import main; raise SystemExit(main({!r}))"
COMPUTE = (
    "import torch; print((torch.ones(2, 2, device='npu') @ torch.ones(2, 2, device='npu')).sum().item())"
)


class Environment:
    """A Python environment of its own that sees the packages of this one, but none of its boot files."""

    def __init__(self, folder: Path):
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.python = folder / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        packages = environment.site_packages()
        (self.site / "__a_packages.pth").write_text(f"{packages}\n")
        for editable in packages.glob("__editable__*.pth"):
            shutil.copy(editable, self.site)

    def command(self, *arguments: str, **env: str | None) -> subprocess.CompletedProcess:
        code = COMMAND.format(list(arguments))
        return attempt(code, python=self.python, timeout=900, ASCEND_HOME_PATH=None, **env)

    def traces(self) -> set[str]:
        return {path.name for path in self.site.rglob("*") if "virtual_npu" in path.name}


@pytest.fixture
def fresh(tmp_path) -> Environment:
    return Environment(tmp_path / "venv")


@pytest.fixture(scope="module")
def enabled(tmp_path_factory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("enabled") / "venv")
    done = made.command("enable")
    assert done.returncode == 0, done.stderr
    return made


def test_without_enable_torch_fails_as_it_does_without_us(fresh):
    done = attempt("import torch", python=fresh.python)
    assert done.returncode != 0
    assert "libhccl.so" in done.stderr  # CANN is missing, as torch_npu says itself
    assert "npufleet" not in done.stderr
    assert run("import sys; print([m for m in sys.modules if 'virtual' in m])", python=fresh.python) == "[]"


def test_enable_makes_torch_work_and_spawned_processes_have_it(enabled, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing\n"
        "def child(queue):\n"
        "    import torch\n"
        "    queue.put(torch.arange(4., device='npu').sum().item())\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    print(queue.get(timeout=120))\n"
        "    process.join()\n"
    )
    done = subprocess.run([enabled.python, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "6.0", done.stderr[-3000:]


def test_a_process_without_torch_loads_nothing_of_it(enabled):
    loaded = run(
        "import sys; print('npufleet' in sys.modules, 'torch' in sys.modules)", python=enabled.python
    )
    assert loaded == "False False"


def test_torch_without_autoload_stays_alone_until_somebody_imports_torch_npu(enabled):
    code = "import torch; print(hasattr(torch, 'npu')); import torch_npu; print(torch.ones(2).npu().tolist())"
    assert run(code, python=enabled.python, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False\n[1.0, 1.0]"


def test_nothing_extra_is_printed_on_stdout(enabled):
    assert run(COMPUTE, python=enabled.python) == "8.0"


def test_a_wrong_device_setting_stops_the_import_with_its_reason(enabled):
    done = attempt("import torch_npu", python=enabled.python, NPUFLEET_DEVICE="virtual:many")
    assert "NPUFLEET_DEVICE='virtual:many': COUNT must be a whole number" in done.stderr


def test_status_tells_state_and_device(enabled, fresh):
    on = enabled.command("status", NPUFLEET_DEVICE="virtual:2:Ascend910B4")
    assert on.returncode == 0
    assert f"enabled in {enabled.site}" in on.stdout
    assert "virtual:2:Ascend910B4,hbm=32GiB" in on.stdout
    assert "torch-npu 2." in on.stdout
    assert "not enabled" in fresh.command("status").stdout


def test_another_torch_version_is_an_error_that_names_the_command(fresh):
    assert fresh.command("enable").returncode == 0
    module = fresh.site / environment.MODULE
    text = module.read_text().splitlines()
    module.write_text("\n".join("TORCH = '2.12.0'" if line.startswith("TORCH = ") else line for line in text))
    done = attempt("import torch_npu", python=fresh.python)
    assert "was built for torch 2.12.0" in done.stderr
    assert "python -m npufleet.kernels.virtual enable" in done.stderr
    assert "stale" in fresh.command("status").stdout


def test_a_missing_build_is_an_error_that_names_the_command(fresh):
    assert fresh.command("enable").returncode == 0
    module = fresh.site / environment.MODULE
    text = module.read_text().splitlines()
    module.write_text(
        "\n".join("BUILD = '/nowhere'" if line.startswith("BUILD = ") else line for line in text)
    )
    done = attempt("import torch_npu", python=fresh.python)
    assert "lacks its build /nowhere" in done.stderr
    assert "python -m npufleet.kernels.virtual enable" in done.stderr


def test_disable_removes_every_trace(fresh):
    assert fresh.command("enable").returncode == 0
    assert run("print(1)", python=fresh.python) == "1"  # compiles the boot module, which is a trace too
    assert fresh.traces()
    assert fresh.command("disable").returncode == 0
    assert not fresh.traces()
    assert "libhccl.so" in attempt("import torch", python=fresh.python).stderr
    assert "was not enabled" in fresh.command("disable").stdout


def test_enable_refuses_where_cann_is_installed(fresh, tmp_path):
    arguments = {"python": fresh.python, "ASCEND_HOME_PATH": str(tmp_path)}
    done = attempt(COMMAND.format(["enable"]), **arguments)
    assert done.returncode == 1
    assert "CANN is installed here" in done.stderr and "--force" in done.stderr
    assert not fresh.traces()
    assert attempt(COMMAND.format(["enable", "--force"]), **arguments).returncode == 0
    assert environment.MODULE in fresh.traces()


def test_enable_without_a_compiler_says_what_is_missing(fresh, tmp_path):
    done = fresh.command("enable", PATH="", NPUFLEET_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "g++ was not found" in done.stderr
    assert not fresh.traces()
