"""Loads a trained run: its model and everything that the model needs in use."""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from echo_jax.config.run import RunSpec
from echo_jax.config.saved import read_config
from echo_jax.data.prepare.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer
from echo_jax.files.folders import run_folder, typed_path
from echo_jax.files.json_files import DamagedFileError
from echo_jax.training.arrays import call_with_host_arrays
from echo_jax.training.saving.model import TASK_FILE, read_task
from echo_jax.training.saving.weights import read_model
from echo_jax.workloads import make_task
from echo_jax.workloads.base import Batch, Task, Variables
from echo_jax.workloads.lm import LanguageModel

__all__ = ["Input", "TrainedRun", "load_run"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_jitted(
    task: LanguageModel,
    vocab: int,
    variables: Variables,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    number: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    logits = task.predict(variables, {"tokens": tokens})["logits"]
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    last = jnp.where(jnp.arange(last.shape[1])[None] < vocab, last, -jnp.inf)
    # At temperature 0 the draw is not used.
    key = jax.random.fold_in(key, number)
    drawn = jax.random.categorical(key, last / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, last.argmax(axis=-1))


Input = str | os.PathLike[str] | bytes | np.ndarray
"""An image: a file's path, its bytes, or ``uint8[height, width, 3 or 1]``. Or a text,
which is a ``str`` itself."""


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A trained model, with the preprocessing of its task.

    Attributes:
      workdir: The folder in which it was trained.
      config: The config of its training.
      update: Updates done.
      task: Model and loss, as pure functions; see `echo_jax.workloads.Task`.
      variables: Parameters and other collections, on the first device.
      task_info: The meaning of the outputs: ``classes``, ``categories`` or ``vocab``.
      task_files: Files that belong to it, such as a tokenizer's.

    Example:
      >>> run = load_run("runs/cifar10")
      >>> found = run.predict(["cat.jpg", "ship.png"])["probabilities"]
      >>> [run.classes[i] for i in found.argmax(axis=1)]
      ['cat', 'ship']
    """

    workdir: epath.Path
    config: RunSpec
    update: int
    task: Task
    variables: Variables
    task_info: Mapping[str, Any]
    task_files: Mapping[str, bytes]

    @property
    def classes(self) -> list[str]:
        """Names of the classes in the order of the model's outputs; empty for text."""
        return class_names(self.task_info)

    @property
    def is_of_text(self) -> bool:
        """Whether inputs are texts, not images."""
        return isinstance(self.task, LanguageModel)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a language model."""
        return tokenizer_of(self.task_info, self.task_files)

    def read(self, inputs: Sequence[Input]) -> Batch:
        """Makes a batch of inputs, preprocessed as in evaluation.

        Args:
          inputs: At least one image or text.

        Returns:
          ``"image"``, ``uint8[B, S, S, 3]``; or ``"tokens"``, ``int32[B, T]`` with
          zeros after the end of shorter texts, and ``"length"``, ``int32[B]``.

        Raises:
          ValueError: An input cannot be read, a text is longer than the model's T, or
            `inputs` is a single input instead of a list.
        """
        _refuse_single(inputs)
        if not len(inputs):
            raise ValueError("there is nothing to predict; give one input at least")
        if self.is_of_text:
            return self._read_texts(inputs)
        items = [self._decoded(each) for each in inputs]
        return {name: np.stack([item[name] for item in items]) for name in items[0]}

    def predict(self, batch: Batch | Sequence[Input]) -> dict[str, np.ndarray]:
        """Returns the model's predictions for every example; see its `Task.predict`.

        Args:
          batch: Arrays with a leading axis of size B, as from `read`; or inputs for
            `read`, which are computed in batches of the config's size.

        Returns:
          Arrays by name, with a leading axis of size B. A classifier returns
          ``"probabilities"``, ``float32[B, K]``. A detector returns ``"boxes"``,
          ``float32[B, D, 4]``, as fractions of the image (ymin, xmin, ymax, xmax), and
          ``"scores"`` and ``"labels"``, ``[B, D]``, the highest score first and then
          padding with 0. A language model returns ``"logits"`` of the token after each
          token, ``float32[B, T, V]``.

        Raises:
          ValueError: See `read`.
        """
        if isinstance(batch, Mapping):
            return self._compute(batch)
        _refuse_single(batch)
        rows, parts = min(len(batch), self.config.batch_size) or 1, []
        for start in range(0, len(batch) or 1, rows):
            read = self.read(batch[start : start + rows]).items()
            # The last batch is padded, so that it needs no other compilation.
            filled = {name: np.resize(x, (rows, *x.shape[1:])) for name, x in read}
            parts.append(self._compute(filled))
        whole = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        return {name: x[: len(batch)] for name, x in whole.items()}

    def generate(
        self,
        prompts: Sequence[str],
        *,
        tokens: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Continues texts, token by token.

        Args:
          prompts: The texts.
          tokens: Maximum number of added tokens; fewer where the document ends.
          temperature: Divides the logits; 0 takes the likeliest token.
          seed: The seed of the drawn tokens.

        Returns:
          The continuation of each prompt.

        Raises:
          ValueError: The model is not a language model; a prompt is empty and the model
            has no token that begins a document; a number is invalid; or `prompts` is a
            single prompt instead of a list.
        """
        _refuse_single(prompts)
        if not self.is_of_text:
            raise ValueError(
                f"{self.workdir} was trained on images, and continues no text"
            )
        encoded = [self.tokenizer.encode(prompt).tolist() for prompt in prompts]
        added = self.continue_tokens(
            encoded, tokens, temperature=temperature, seed=seed
        )
        return [self.tokenizer.decode(each) for each in added]

    # Each token is computed from the last T tokens without a cache. So a text may grow
    # beyond T, and one program serves all lengths. The draws for a prompt depend on
    # `seed` and on the prompt's index. Tokens outside the vocabulary are never drawn.
    def continue_tokens(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        temperature: float,
        seed: int,
    ) -> list[list[int]]:
        """Returns the tokens that continue each sequence; see `generate`."""
        if num_tokens < 1:
            raise ValueError(f"tokens={num_tokens} must be at least 1")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be at least 0")
        vocab, eod = self.task_info["vocab"], self.task_info["eod"]
        start = [] if eod is None else [eod]
        rows = [[*start, *prompt] for prompt in prompts]
        if not all(rows):
            raise ValueError(
                "an empty text cannot be continued by a model that knows no beginning "
                "of a document; begin it with a word"
            )
        begun = [len(row) for row in rows]
        length = cast(LanguageModel, self.task).model.max_len
        key = call_with_host_arrays(jax.random.key, seed)
        program = functools.partial(_next_jitted, self.task, vocab)
        is_open = [True] * len(rows)
        for number in range(num_tokens):
            if not any(is_open):
                break
            windows = _padded([row[-length:] for row in rows], length)
            asked = *windows, key, number, float(temperature)
            drawn = call_with_host_arrays(program, self.variables, *asked)
            for index, token in enumerate(jax.device_get(drawn).tolist()):
                is_open[index] &= token != eod
                if is_open[index]:
                    rows[index].append(token)
        return [row[at:] for row, at in zip(rows, begun, strict=True)]

    @functools.cached_property
    def _jitted(self) -> Any:
        return jax.jit(self.task.predict)

    def _compute(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        outputs = call_with_host_arrays(self._jitted, self.variables, dict(batch))
        return {name: np.asarray(x) for name, x in jax.device_get(outputs).items()}

    def _decoded(self, image: Input) -> dict[str, Any]:
        if isinstance(image, bytes | np.ndarray):
            return self.task.decode_input(image)
        path = typed_path(image)
        try:
            return self.task.decode_input(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _read_texts(self, texts: Sequence[Input]) -> Batch:
        length = cast(LanguageModel, self.task).model.max_len
        rows = []
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"{text!r:.60} is no text; give str")
            rows.append(self.tokenizer.encode(text))
            if len(rows[-1]) > length:
                raise ValueError(
                    f"a text of {len(rows[-1])} tokens is longer than the model's "
                    f"{length}; give parts of it"
                )
        tokens, lengths = _padded(rows, length)
        return {"tokens": tokens, "length": lengths}


def _padded(rows: Sequence[Any], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens with zeros after their ends, and how long they were."""
    tokens = np.zeros((len(rows), length), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def class_names(task_info: Mapping[str, Any]) -> list[str]:
    """Returns the names of the classes in the order of the model's outputs."""
    categories = task_info.get("categories", [])
    return task_info.get("classes", [each["name"] for each in categories])


def tokenizer_of(
    task_info: Mapping[str, Any], task_files: Mapping[str, bytes]
) -> Tokenizer:
    """Returns the tokenizer of a language model, from its name and its file."""
    name = task_info["tokenizer"]
    return ByteTokenizer() if name == "bytes" else SubwordTokenizer(task_files[name])


def load_run(workdir: str | os.PathLike[str], update: int | None = None) -> TrainedRun:
    """Loads a trained model without its data, also from another machine.

    Nothing in the folder is changed; the run may still be training.

    Args:
      workdir: The run folder, a path or ``gs://BUCKET/FOLDER``.
      update: The update of the checkpoint; None for the newest. If the newest is
        damaged, the one before is loaded with a warning.

    Raises:
      ValueError: The folder holds no run, no checkpoint, or none of that update; or
        its content is damaged.
      FolderError: The folder cannot be opened.

    Example:
      >>> run = ej.load_run("runs/wikitext2")
      >>> run.generate(["The museum was"], tokens=20, temperature=0.0)
      [' built in the early 19th century , and the ...']
    """
    folder = run_folder(workdir)
    config, (info, files) = read_config(folder), read_task(folder)
    try:
        task = make_task(config, info)
        wanted = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # The model cannot come from a run of this package.
        what = f"it does not fit config.json ({error!r})"
        raise DamagedFileError(folder / TASK_FILE, what) from error
    update, model = read_model(folder, update)
    variables = model.variables
    if jax.tree.map(np.shape, variables) != jax.tree.map(np.shape, wanted):
        what = "the checkpoint holds another model"
        raise DamagedFileError(folder / "config.json", what)
    return TrainedRun(folder, config, update, task, variables, info, files)


def _refuse_single(inputs: Any) -> None:
    """Refuses a single input instead of a list: a str is also a sequence."""
    if isinstance(inputs, str | bytes | os.PathLike):
        raise ValueError(
            f"{inputs!r:.60} is a single input; give a list, [{inputs!r:.60}]"
        )
