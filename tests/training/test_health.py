"""What a run says of itself."""

import subprocess
import sys

from torch import device

from tandem.training.health import peak_memory


def test_peak_memory_is_of_this_process_and_of_no_other():
    ballast = bytearray(b"x" * 700_000_000)
    assert peak_memory(device("cpu")) > len(ballast)
    code = "import torch; from tandem.training.health import peak_memory; print(peak_memory(torch.device('cpu')))"
    assert 50e6 < int(subprocess.check_output([sys.executable, "-c", code])) < len(ballast)
