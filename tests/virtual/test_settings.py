"""NPUFLEET_DEVICE: what it may say and what is refused."""

import pytest

from npufleet.kernels.virtual import settings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "count", "soc", "hbm", "null"),
    [
        ("virtual:1", 1, "Ascend910B3", 64 * GIB, False),
        ("virtual:8:Ascend910B3", 8, "Ascend910B3", 64 * GIB, False),
        ("virtual:16:Ascend910_9391,hbm=16GiB", 16, "Ascend910_9391", 16 * GIB, False),
        ("virtual:2:Ascend910B4,null", 2, "Ascend910B4", 32 * GIB, True),
        ("virtual:2,null,hbm=512MiB", 2, "Ascend910B3", GIB // 2, True),
        ("virtual:2,hbm=1.5GiB", 2, "Ascend910B3", 3 * GIB // 2, False),
    ],
)
def test_a_setting_says_count_chip_memory_and_mode(text, count, soc, hbm, null):
    parsed = settings.parse(text)
    assert (parsed.count, parsed.soc.name, parsed.hbm_bytes, parsed.null_mode) == (count, soc, hbm, null)
    assert settings.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("npu:8", "virtual:COUNT"),
        ("virtual", "virtual:COUNT"),
        ("virtual:0", "1 to 64"),
        ("virtual:65", "1 to 64"),
        ("virtual:eight", "'eight'"),
        ("virtual:²", "1 to 64"),
        ("virtual:8:Ascend920", "Ascend910B3"),
        ("virtual:8:Ascend910B3:x", "virtual:COUNT"),
        ("virtual:8,hbm=16", "16GiB"),
        ("virtual:8,hbm=1KiB", "64MiB"),
        ("virtual:8,hbm=-4GiB", "'-4GiB'"),
        ("virtual:8,fast", "'fast'"),
        ("virtual:8,null=1", "'null=1'"),
        ("virtual:8,null,null", "twice"),
    ],
)
def test_a_wrong_setting_names_what_was_given_and_what_is_allowed(text, named):
    with pytest.raises(ValueError, match="NPUFLEET_DEVICE") as raised:
        settings.parse(text)
    assert named in str(raised.value)
    assert repr(text) in str(raised.value)


def test_the_default_is_eight_b3(monkeypatch):
    monkeypatch.delenv("NPUFLEET_DEVICE", raising=False)
    assert str(settings.from_environment()) == "virtual:8:Ascend910B3,hbm=64GiB"


def test_home_follows_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("NPUFLEET_HOME", str(tmp_path))
    assert settings.home() == tmp_path / "virtual-npu"
