"""Bugs of steps, optimisers, checkpoints and processes."""

CHECKPOINT = "tests/training/test_checkpoint.py"
ALIKE = "test_recipes_that_differ_are_told_once_and_nothing_is_trained"
PARALLEL = "tests/training/test_parallel.py"
TRUNK = "tests/training/test_trunk.py"

# fmt: off
BUGS = {
    "recipe/document.py": [
        ("a mixture joins the one that it replaces", "tests/recipe/test_resolve.py",
         "len(above) > 1 and is_mapping(*above[-2:]) and not top.dotted", "False"),
    ],
    "recipe/resolve.py": [
        ("what followed from other values outlives them", "tests/recipe/test_resolve.py",
         "!= now.get(key):", "!= was.get(key):"),
    ],
    "recipe/settings.py": [
        ("infinity is a number like any other", "tests/recipe/test_mistakes.py",
         "allow_inf_nan=False", "allow_inf_nan=True"),
    ],
    "training/start.py": [
        ("weights are taken whose ids mean something else", "tests/training/test_start.py",
         "Tokenizer.from_file(own).hash == corpus.tokenizer.hash", "True"),
    ],
    "training/device.py": [
        ("mixed precision is told and not done", "tests/training/test_loop.py",
         "torch.autocast(device.type, dtype=dtype)", "nullcontext()"),
    ],
    "training/health.py": [
        ("signals are asked for where there are none", "tests/training/test_health.py",
         "if is_main and signal", "if signal"),
        ("an infinite gradient is learned from", "tests/training/test_health.py",
         "if not math.isfinite(value)]", "if math.isnan(value)]"),
    ],
    "training/checkpoint.py": [
        ("the optimiser is not restored", CHECKPOINT,
         "saved.load(wanted,", "saved.load({n: t for n, t in wanted.items() if n.startswith(NETWORK)},"),
        ("the network is not restored", CHECKPOINT,
         "saved.load(wanted,", "saved.load({n: t for n, t in wanted.items() if n.startswith(OPTIMISER)},"),
        ("a checkpoint gets its name before its manifest", CHECKPOINT,
         """        checked.write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        flush(partial)
        partial.rename(target)
""",
         """        partial.rename(target)
        checked.write(target / MANIFEST, json.dumps(manifest, indent=1).encode())
        flush(target)
"""),
    ],
    "training/checked.py": [
        ("what is read is not held against the manifest", CHECKPOINT,
         "if expected != _entry(data):", "if False:"),
    ],
    "training/parallel.py": [
        ("ddp divides gradients by the processes", PARALLEL,
         "model.register_comm_hook(None, _add)", "pass"),
        ("fsdp divides gradients by the processes", PARALLEL,
         "module.set_gradient_divide_factor(1.0)", "pass"),
        ("targets are counted by every process for itself", PARALLEL,
         "for number in SIGNALS)])\n        dist.all_reduce(total)", "for number in SIGNALS)])"),
        ("one that has waited too long ends with a traceback",
         "tests/training/test_resume.py::test_a_process_that_waits_too_long_for_another_says_so",
         ', "imed out")', ")"),
    ],
    "training/trunk.py": [
        ("a branch begins beyond what is common", TRUNK,
         "0 < step_of(c) <= common", "0 < step_of(c) < run.steps"),
        ("a trunk with another seed will do", TRUNK,
         "(*may,)", '(*may, "seed", "optimiser")'),
        ("the steps taken over leave no record", TRUNK,
         "replace_file(folder.metrics, taken_over())", 'replace_file(folder.metrics, b"")'),
        ("the steps taken over are those of a run as long as the trunk", TRUNK,
         '"steps": run.steps', '"steps": trunk.steps'),
    ],
    "training/run.py": [
        ("runs part at no switch", TRUNK,
         "min(steps, self.steps, *switches)", "min(steps, self.steps)"),
        ("bags and tokens are read alike", TRUNK,
         "bool(phase.note)", "None"),
        ("runs part at no rate", TRUNK,
         "if schedule(step) != self.schedule(step)", "if False"),
        ("streams do not grow with the run", TRUNK,
         "if self.rows.of_run(steps) is not self.rows.of_run(self.steps):", "if False:"),
        ("who opens a run begins PyTorch's generator again", "tests/training/test_device.py",
         "with torch.random.fork_rng(devices=[]):", "if True:"),
        ("every process reads the same rows", PARALLEL,
         "self.ranks.rank * pieces", "0 * pieces"),
        ("processes of two recipes train as one", "tests/training/test_resume.py::" + ALIKE,
         "ranks.require_alike(told)", "ranks.require_alike({})"),
    ],
    "machine.py": [
        ("a process outlives the one that was killed as it began", "tests/corpus/test_sentences.py",
         "if os.getppid() != parent:", "if False:"),
        ("a container's share of its machine goes unseen", "tests/test_machine.py",
         ", *map(math.ceil, _quotas(system))", ""),
        ("only a container's own group is asked", "tests/test_machine.py",
         "(own, *own.parents[: len(own.parts) - len(top.parts)])", "(own,)"),
        ("threads are as many as a container sees", "tests/test_machine.py",
         'os.environ.setdefault("OMP_NUM_THREADS", str(cores()))', "pass"),
    ],
    "comparison/runner.py": [
        ("runs of a study join the group of their command",
         "tests/comparison/test_runner.py::test_a_run_sees_the_gpu_that_it_was_dealt_and_joins_no_group",
         " if key not in GROUP", ""),
    ],
    "comparison/trained.py": [
        ("a checkpoint that training replaces is called damaged",
         "tests/test_wrong_input.py::test_a_checkpoint_that_training_replaces_meanwhile_is_taken_anew",
         "if newest is None or newest == last:", "if True:"),
        ("a trained network is given any setting", "tests/comparison/test_free_settings.py",
         "not in free:", "in ():"),
        ("a trained network keeps its settings", "tests/comparison/test_free_settings.py",
         "changed(recipe, overrides) if overrides else recipe", "recipe"),
        ("an analysis does not tell the settings", "tests/comparison/test_free_settings.py",
         '{"overrides": overrides} if overrides else {}', "{}"),
    ],
    "training/schedule.py": [
        ("the first step is lost", "tests/training/test_schedule.py",
         "else step + 1\n", "else step\n"),
        ("the decay ends a step early", "tests/training/test_schedule.py",
         "max(0, self.steps - step) / decay", "max(0, self.steps - step - 1) / decay"),
    ],
    "training/speed.py": [
        ("memory is that of the first phase", "tests/training/test_switch.py",
         "phase.first < max(1, scratch.steps)", "not phase.first"),
        ("a step is timed that is compiled again", "tests/training/test_loop.py",
         "max(mean[-COUNTED:]) > STEADY * min(mean[-COUNTED:])", "False"),
    ],
    "training/loop.py": [
        ("a resumed run repeats its last step", "tests/training/test_resume.py",
         "seconds = step + 1, run", "seconds = step, run"),
        ("the first micro-batch sends gradients, not the last", PARALLEL,
         "index == len(batches)", "index == 1"),
    ],
    "training/optimiser.py": [
        ("gradients are not cleared", "tests/training/test_loop.py",
         "self.inner.zero_grad(set_to_none=True)", "pass"),
        ("the state moves on though the step is skipped", "tests/training/test_progress.py",
         "        if update:\n", "        if True:\n"),
        ("everything decays", "tests/training/test_optimiser.py",
         "config.weight_decay if decayed else 0.0", "config.weight_decay"),
    ],
    "training/progress.py": [
        ("a spike enters the estimate whole", "tests/training/test_progress.py",
         "(limit if high else value) - mean", "value - mean"),
    ],
    "training/muon.py": [
        ("the table is a hidden matrix", "tests/training/test_muon.py",
         "role[name] in HIDDEN", "role[name] in HIDDEN | {\"embedding\"}"),
        ("q, k and v are one matrix", "tests/training/test_muon.py",
         "whole(update).split(group[\"parts\"], dim=-2)", "(whole(update),)"),
    ],
}
# fmt: on
