"""Asking for the current stream at each hook: on CUDA it gives the objects that it gave before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdp_runtime.streams import CurrentStream


def test_a_cuda_stream_that_was_seen_before_is_the_object_made_then(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 0

    def current_stream(device: torch.device) -> SimpleNamespace:  # as torch.cuda's: new at each call
        assert device == torch.device("cuda", 1)
        return SimpleNamespace(cuda_stream=current)

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_stream=current_stream))
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current if index == 1 else -1, raising=False
    )
    ask = CurrentStream(torch.device("cuda", 1))
    default = ask()
    current = 7
    side = ask()
    assert side.cuda_stream == 7
    assert ask() is side
    current = 0
    assert ask() is default


def test_a_cpu_is_asked_each_time() -> None:
    assert CurrentStream(torch.device("cpu"))() == torch.cpu.current_stream()
