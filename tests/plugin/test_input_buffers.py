"""Host buffers of a step's inputs: not written while the step before may still copy from them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from npufleet.plugin.model_runner import NPUModelRunner


@pytest.mark.parametrize(("copied", "waits"), [(True, []), (False, [call.synchronize()])])
def test_the_host_waits_only_for_copies_that_are_still_to_come(copied: bool, waits: list[object]) -> None:
    event = Mock(query=Mock(return_value=copied))
    with NPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=event)):
        assert event.method_calls == [call.query(), *waits]
    assert event.method_calls[-1] == call.record()


def test_a_step_that_fails_leaves_its_copies_guarded() -> None:
    event = Mock()
    with (
        pytest.raises(RuntimeError),
        NPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=event)),
    ):
        raise RuntimeError("no input")
    assert event.record.called


def test_steps_that_are_not_scheduled_ahead_need_no_guard() -> None:
    with NPUModelRunner.synchronize_input_prep(SimpleNamespace(prepare_inputs_event=None)):
        pass
