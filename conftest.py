"""What must stand before any test: Triton's interpreter where there is no CUDA, signals that tests can send, and
imports that the garbage collector does not slow down."""

import gc
import os
import signal

import torch

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignored where a shell or nohup started the tests so,
    if signal.getsignal(number) is signal.SIG_IGN:  # which their runs would inherit and honour
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

gc.set_threshold(*gc.get_threshold()[:2], 1000)  # as the command does, before the tests import all there is
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
