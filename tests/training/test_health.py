"""What a run says of itself, and what it does not go on with."""

import math
import os
import signal
import subprocess
import sys
import threading

import pytest
from torch import device, tensor

from tandem.training.health import NotFinite, StopRequest, peak_memory, require_finite


def test_peak_memory_is_of_this_process_and_of_no_other():
    ballast = b"x" * 1_000_000_000
    assert peak_memory(device("cpu")) > len(ballast)
    code = "import torch; from tandem.training.health import peak_memory; print(peak_memory(torch.device('cpu')))"
    assert 50e6 < int(subprocess.check_output([sys.executable, "-c", code])) < len(ballast)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_losses_and_norms_that_are_not_finite_are_refused(wrong):
    require_finite({"nll": tensor(3.0), "balance": tensor(0.0)}, tensor(1e30), 7, "here")
    with pytest.raises(NotFinite, match=r"step 7: gradient norm not finite.* The batch: here"):
        require_finite({"nll": tensor(3.0)}, tensor(wrong), 7, "here")
    with pytest.raises(NotFinite, match="step 7: balance not finite"):
        require_finite({"nll": tensor(3.0), "balance": tensor(wrong)}, tensor(1.0), 7, "here")


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_number is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone():
    found = []

    def ask():
        with StopRequest() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.signal_number))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [(before, None)]
