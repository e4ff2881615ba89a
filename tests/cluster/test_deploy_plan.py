"""What a change of the fleet means: steps, and whether clients notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.schema import DeploymentStatus

from npufleet.cluster import config
from npufleet.cluster.app import assemble
from npufleet.cluster.deploy import connect
from npufleet.cluster.deploy.plan import Kind, render, steps
from npufleet.cluster.deploy.wish import Wish, generation


def wish(*models: dict[str, Any], **more: Any) -> Wish:
    return Wish.of(config.from_dict({"models": list(models), "device": "virtual", **more}))


def model(name: str = "a", engines: int = 2, source: str = "/a", **engine: Any) -> dict[str, Any]:
    return {"name": name, "source": source, "engines": engines, "engine": engine}


def kinds(before: Wish, after: Wish, **room: int) -> list[tuple[str, str]]:
    return [(str(step.kind), step.what) for step in steps(before, after, room)]


def test_equal_wishes_need_nothing() -> None:
    assert steps(wish(model()), wish(model()), {}) == ()
    assert render(()) == "nothing changes"


def test_models_come_and_go() -> None:
    before, after = wish(model("a")), wish(model("b"))
    assert kinds(before, after, b=2) == [("add", "b"), ("remove", "a")]
    assert "only 1 of them find NPUs now" in render(steps(before, after, {"b": 1}))


def test_other_engine_arguments_roll_and_say_how() -> None:
    before, after = wish(model()), wish(model(max_model_len=4096))
    (step,) = steps(before, after, {"a": 8})
    assert (step.kind, step.surge, step.notice) == (Kind.ROLL, 2, "")
    assert "max_model_len unset -> 4096" in step.text
    (step,) = steps(before, after, {"a": 0})
    assert step.surge == 0
    assert step.notice == "1 of 2 engines answer meanwhile"
    (step,) = steps(wish(model(engines=1)), wish(model(engines=1, source="/b")), {})
    assert step.notice.startswith("it is the only engine")


def test_arguments_of_the_gateway_restart_no_engine() -> None:
    before, after = wish(model()), wish(model(tool_call_parser="hermes"))
    assert kinds(before, after) == [("settings", "a")]
    assert generation(before.config, before.config.models[0]) == generation(
        after.config, after.config.models[0]
    )


def test_numbers_of_engines() -> None:
    before = wish(model(engines=2))
    assert kinds(before, before.resized("a", 3), a=1) == [("scale", "a")]
    assert steps(before, before.resized("a", 3), {"a": 1})[0].notice == ""
    assert steps(before, before.resized("a", 4), {"a": 1})[0].notice.startswith("only 1 of 2 more")
    assert steps(before, before.resized("a", 0), {})[0].notice.startswith("requests are refused")
    with pytest.raises(ValueError, match="no model 'x'; it has 'a'"):
        before.resized("x", 1)
    with pytest.raises(ValueError, match="expected 0 to"):
        before.resized("a", -1)


def test_a_number_that_follows_the_load_stays_within_its_bounds() -> None:
    def bounded(low: int, high: int) -> Wish:
        return wish({**model(), "engines": {"min": low, "max": high, "objectives": {"ttft_p90": "2s"}}})

    before = bounded(0, 4)
    assert before.engines == {"a": 1} and Wish.from_dict(before.to_dict()) == before
    grown = before.scaled("a", 4)
    assert grown.changed_to(bounded(1, 3).config).engines == {"a": 3}
    assert grown.changed_to(wish(model()).config).engines == {"a": 2}
    assert grown.resized("a", 2).engines == {"a": 2}
    with pytest.raises(ValueError, match="follows the load between 0 and 4"):
        grown.resized("a", 5)


def test_front_end_controller_and_what_cannot_change() -> None:
    before = wish(model())
    assert kinds(before, wish(model(), router={"policy": "round-robin"})) == [("restart", "front end")]
    assert kinds(before, wish(model(), metrics={"port": 9})) == [("restart", "controller")]
    assert kinds(before, wish(model(), front_ends=3)) == [("scale", "front ends")]
    with pytest.raises(ValueError, match="name is 'npufleet', and no running fleet can change it to 'x'"):
        steps(before, wish(model(), name="x"), {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 9)), min_size=1))
def test_a_wish_reads_back_and_its_versions_follow_what_matters(
    given_models: list[tuple[str, int, int]],
) -> None:
    made = {name: model(name, count, max_num_seqs=seqs) for name, count, seqs in given_models}
    before = wish(*made.values())
    assert Wish.from_dict(before.to_dict()) == before
    under_way = Wish(config=before.config, engines=before.engines, previous=before)
    assert Wish.from_dict(under_way.to_dict()) == under_way
    for entry in before.config.models:
        other = wish(model(entry.name, 9, max_num_seqs=entry.engine["max_num_seqs"]))
        assert generation(other.config, other.config.models[0]) == generation(before.config, entry)


def test_serve_restarts_only_what_changed() -> None:
    """What Serve compares: each deployment's version, its number of replicas, its user_config."""

    def versions(of: Wish, surge: dict[str, int] | None = None) -> dict[str, tuple[str | None, int, int]]:
        found = {}
        ingress = assemble(of, surge=surge)
        pending = [ingress]
        while pending:
            application = pending.pop()
            deployment = application._bound_deployment
            found[deployment.name] = (
                deployment.version,
                deployment.num_replicas,
                deployment._deployment_config.max_surge_percent,
            )
            for argument in (*deployment.init_args, *deployment.init_kwargs.values()):
                nested = argument if isinstance(argument, list) else [argument]
                pending += [item for item in nested if hasattr(item, "_bound_deployment")]
        return found

    first = versions(wish(model("a"), model("b")))
    assert set(first) == {"Controller", "Router", "Engine:a", "Engine:b"}
    assert versions(wish(model("a"), model("b"))) == first
    second = versions(wish(model("a", engines=3), model("b", max_num_seqs=4)), {"b": 1})
    assert second["Controller"] == first["Controller"] and second["Router"] == first["Router"]
    assert second["Engine:a"] == (first["Engine:a"][0], 3, 0)
    assert second["Engine:b"][0] != first["Engine:b"][0] and second["Engine:b"][2] == 50
    doors = versions(wish(model("a"), front_ends=3))["Router"]
    assert doors[:2] == (first["Router"][0], 3), "those that are there stay"
    assert (first["Router"][2], doors[2]) == (100, 33), "others serve before those that are replaced end"
    asleep = wish(model("a")).resized("a", 0)
    assert "Engine:a" not in versions(asleep)


@pytest.mark.parametrize(
    ("deployments", "up"),
    [
        ({}, False),
        ({"Router": DeploymentStatus.UPDATING}, False),
        ({"Router": DeploymentStatus.HEALTHY, "Engine:m": DeploymentStatus.UNHEALTHY}, True),
    ],
)
def test_the_front_end_is_asked_for_by_itself(
    monkeypatch: pytest.MonkeyPatch, deployments: dict[str, Any], up: bool
) -> None:
    told = {name: SimpleNamespace(status=status) for name, status in deployments.items()}
    application = SimpleNamespace(deployments=told)
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={"npufleet": application}))
    line_to = object.__new__(connect.ControllerLine)
    assert line_to.front_is_up() is up
    monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications={}))
    assert not line_to.front_is_up()
