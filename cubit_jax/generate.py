"""Text from a trained run: python -m cubit_jax.generate --workdir=DIR --prompt='def' --max_new_tokens=100"""

import pathlib
import sys

from absl import flags

from cubit_jax.inference.generation import check_sampling
from cubit_jax.runtime import cli, distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.training.trained import load_run


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Folder of the run, as given to train.")
    flags.DEFINE_string(
        "step", "latest", "Checkpoint to use: its step, latest, or best, the one with the lowest held-out loss."
    )
    flags.DEFINE_multi_string(
        "prompt", [], "Text to go on from; give the flag again for a batch of several. An empty one begins a document."
    )
    flags.DEFINE_multi_string("prompt_file", [], "File whose whole text is a prompt; may be given several times.")
    flags.DEFINE_integer(
        "max_new_tokens",
        100,
        "Tokens to generate at most; a row stops at the end of its document. "
        "Together with the prompt they may exceed the length that the model was trained with.",
    )
    flags.DEFINE_float("temperature", 0.7, "Divides the logits before sampling; 0 takes the most likely token.")
    flags.DEFINE_integer("top_k", None, "Sample from this many most likely tokens only.", upper_bound=2**31 - 1)
    flags.DEFINE_float("top_p", None, "Sample from the fewest tokens whose probabilities sum to this, above 0 to 1.")
    flags.DEFINE_integer("num_samples", 1, "Continuations of each prompt.", lower_bound=1)
    flags.DEFINE_integer(
        "seed", 0, "Of the sampling; the same command gives the same text.", lower_bound=-(2**63), upper_bound=2**63 - 1
    )


def main() -> None:
    distributed.require_one_process("generate")
    options = flags.FLAGS
    prompts = [*options.prompt, *map(_read, options.prompt_file)]
    if not prompts:
        raise UserError("there is no prompt: give --prompt=TEXT or --prompt_file=FILE")
    sampling = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
    }
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are not UTF-8
            raise UserError(f"the prompt {prompt!r} is not UTF-8 text") from error
    try:
        check_sampling(**sampling)
    except ValueError as error:
        raise UserError(error) from error
    run = load_run(options.workdir, options.step)
    longest = 1 + max(len(run.tokenizer.encode(prompt)) for prompt in prompts)
    if longest + options.max_new_tokens > run.config.seq_len:
        print(
            f"note: a prompt of {longest} tokens and {options.max_new_tokens} new ones are longer than the "
            f"{run.config.seq_len} that the model was trained with",
            file=sys.stderr,
        )
    prompts = [prompt for prompt in prompts for _ in range(options.num_samples)]
    texts = run.generate(prompts, seed=options.seed, **sampling)
    for index, (prompt, text) in enumerate(zip(prompts, texts)):
        if len(prompts) > 1:
            print(f"--- prompt {index // options.num_samples + 1}, sample {index % options.num_samples + 1}")
        print(prompt + text)


def _read(path: str) -> str:
    """The text of a file as it is: line ends, too."""
    try:
        return pathlib.Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompt_file={path}: {getattr(error, 'strerror', None) or error}") from error


if __name__ == "__main__":
    define_flags()
    cli.run(main, required=["workdir"])
