"""The training loop: steps, numbers one step late, evaluation, checkpoints, and every way in which a run can stop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cubit_jax.flops import utilization
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.profiler import Trace
from cubit_jax.runtime.progress import Progress
from cubit_jax.training.clock import Clock


@dataclasses.dataclass
class Loop:
    """Trains from the step that `state` holds to config.num_steps, or until asked to stop.

    A step's numbers are read while the device computes the next one, so that it never waits for the host. Where a
    checkpoint or an evaluation is due they are read at once.

    Attributes:
      config, model_config: of the run.
      step_fn: (state, batch on devices) -> (state, metrics), the state donated.
      diagnostics_fn: (params, batch on devices) -> {name: array}.
      evaluate: params -> {"eval/loss": ..., "eval/bits_per_byte": ...}.
      put: local batch of numpy arrays -> batch on devices.
      batches: iterator of batches; data_state: () -> bytes, its position after the batch handed out last.
      checkpoints, writers, stop, trace: Checkpoints, Writers, StopRequest, Trace.
      flops_per_token: of the model, for the utilisation, None if not known; show: whether this process prints.
    """

    config: Any
    model_config: Any
    step_fn: Callable
    diagnostics_fn: Callable
    evaluate: Callable
    put: Callable
    batches: Any
    data_state: Callable
    checkpoints: Any
    writers: Any
    stop: Any
    trace: Trace
    flops_per_token: float | None
    show: bool = True

    def run(self, state):
        """Trains, saves the last state whatever the interval, and returns (state, last evaluation or None, Clock).

        Raises UserError: max_skipped_updates updates in a row were not finite; nothing is saved then. SaveError: a
        checkpoint could not be written.
        """
        config = self.config
        step = int(state["step"])
        self._clock = Clock()
        self._progress = Progress(config.num_steps, step, show=self.show)
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        pending = None  # (step, its metrics, its diagnostics) on the device
        evaluation, evaluate, save = None, False, False  # the last evaluation, and whether it is of this step
        try:
            while step < config.num_steps and not self.stop.at(step):
                batch = next(self.batches, None)
                if batch is None:
                    break
                self.trace.before(step + 1)
                batch = self.put(batch)
                state, numbers = self.step_fn(state, batch)
                step += 1
                self.trace.after(step, numbers)
                if pending is not None:
                    self._record(*pending)
                diagnose, diagnostics = self._due("diagnostics_every", step), {}
                if diagnose:
                    with self._clock.paused("diagnostics"):  # compiles, the first time
                        diagnostics = self.diagnostics_fn(state["params"], batch)
                pending = (step, numbers, diagnostics)
                evaluate = self._due("eval_every", step) or step == config.num_steps
                save = save or self._due("checkpoint_every", step)
                if evaluate or save:
                    numbers, pending = self._read(*pending), None
                    if evaluate:
                        with self._clock.paused("evaluation"):
                            evaluation = self.evaluate(state["params"])
                        save = save or self.checkpoints.is_among_best(evaluation["eval/loss"])
                    self._write(step, numbers | (evaluation if evaluate else {}), always=evaluate or diagnose)
                    # After the numbers are written: a run that goes on from this step does not write them again.
                    # Not while updates are being left out: the checkpoints before the trouble are the ones to keep.
                    if save and not self._skipped_in_a_row:
                        with self._clock.paused("save"):
                            self.checkpoints.save(step, state, self.data_state(), evaluation if evaluate else None)
                        save = False
                self.checkpoints.check()
            if pending is not None:
                self._record(*pending)
            self.checkpoints.save(step, state, self.data_state(), evaluation if evaluate else None)
        finally:
            self._progress.close()
            self.trace.close()
        self.checkpoints.wait()
        return state, evaluation, self._clock

    def _due(self, field, step):
        return bool(self.config[field]) and step % self.config[field] == 0

    def _record(self, step, numbers, diagnostics):
        self._write(step, self._read(step, numbers, diagnostics), always=bool(diagnostics))

    def _read(self, step, numbers, diagnostics):
        """The numbers of a step as the writers take them; waits for the device. Stops a run that cannot go on."""
        numbers, diagnostics = jax.device_get((numbers, diagnostics))
        self._clock.add(float(numbers["tokens"]))
        limit = self.config.max_skipped_updates
        self._skipped_in_a_row = int(numbers["skipped_in_a_row"])
        if self._skipped_in_a_row >= limit:
            self.checkpoints.wait()
            last = self.checkpoints.latest_step
            raise UserError(
                f"stopped at step {step}: the loss, its gradient or the update was not finite in {limit} updates in a "
                f"row (max_skipped_updates={limit}); "
                f"{'there is no checkpoint yet' if last is None else f'the last good checkpoint is {last}'}; try a "
                f"lower optimizer.learning_rate than {self.config.optimizer.learning_rate} in a new workdir"
            )
        result = {"train/loss": float(numbers["loss"]), "skipped_updates": int(numbers["skipped"])}
        for name in ("learning_rate", "gradient_norm", "parameter_norm"):
            result[name] = float(numbers[name])
        return result | flatten_diagnostics(diagnostics, self.model_config)

    def _write(self, step, numbers, always):
        if not (always or self._due("log_every", step) or step == self.config.num_steps):
            self._progress.update(step)
            return
        rate = self._clock.rate()
        numbers["tokens_per_second"] = rate
        numbers["tokens_seen"] = step * self.config.batch_size * self.config.seq_len
        share = utilization(self.flops_per_token, rate, jax.devices())
        if share is not None:
            numbers["model_flop_utilization"] = share
        self.writers.write(step, numbers)
        shown = {"loss": f"{numbers['train/loss']:.3f}"}
        if "eval/loss" in numbers:
            shown["held-out"] = f"{numbers['eval/loss']:.3f}"
        if numbers["skipped_updates"]:
            shown["skipped"] = numbers["skipped_updates"]
        left = self._clock.seconds_left(
            self.config.num_steps - step,
            evaluation=self._number_due("eval_every", step),
            save=self._number_due("checkpoint_every", step),
        )
        self._progress.update(step, left, **shown, **{"tokens/s": f"{rate:,.0f}"})

    def _number_due(self, field, step):
        """How often it is due after `step`; at the end of the run in any case."""
        interval, total = self.config[field] or self.config.num_steps, self.config.num_steps
        return total // interval - step // interval + (total % interval > 0 and step < total)


def flatten_diagnostics(values, model_config):
    """What layers recorded, one number a name: diagnostics/layer_3/mixer/ridge_min.

    Args:
      values: {"layers/block_0/mixer/ridge_min": [groups, ...]} of scanned layers, {"layer_3/mixer/...": ...} of others.
        What has further dimensions gets one name an entry.
      model_config: ModelConfig.
    """
    result = {}
    for name, value in values.items():
        first, _, rest = name.partition("/")
        if first == "layers":
            block, _, rest = rest.partition("/")
            position, period = int(block.removeprefix("block_")), len(model_config.mixers)
            layers = {group * period + position: entry for group, entry in enumerate(value)}
        else:
            layers = {int(first.removeprefix("layer_")): value}
        for layer, entry in layers.items():
            for index, number in np.ndenumerate(entry):
                suffix = "".join(f"/{i}" for i in index)
                result[f"diagnostics/layer_{layer}/{rest}{suffix}"] = float(number)
    return result
