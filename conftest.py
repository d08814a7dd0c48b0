"""What must stand before any test: Triton's interpreter where there is no CUDA, signals that tests can send, and
imports that the garbage collector does not slow down."""

import gc
import os
import signal
from importlib.util import find_spec

import torch

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignored where a shell or nohup started the tests so,
    if signal.getsignal(number) is signal.SIG_IGN:  # which their runs would inherit and honour
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

gc.set_threshold(*gc.get_threshold()[:2], 1000)  # as the command does, before the tests import all there is
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from triton.runtime import interpreter

        patch, restore, patched = interpreter._patch_builtin, interpreter._LangPatchScope.restore, set()

        def patch_once(language, builder, scope):
            """A kernel replaces the language's functions as it starts; so does each function that it calls, which
            changes nothing and took a third of the time."""
            if language not in patched:
                patched.add(language)
                patch(language, builder, scope)

        def restored(scope):
            patched.clear()
            restore(scope)

        interpreter._patch_builtin, interpreter._LangPatchScope.restore = patch_once, restored
        # Else it works out for every sum of integers whether it overflows, a quarter of the time, and tells nobody.
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
