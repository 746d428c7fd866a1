"""Small texts, prepared by the project's own command, and by tensorflow-datasets."""

from pathlib import Path

import tensorflow_datasets as tfds

from echo_jax.data.prepare import Settings, TextSettings, prepare_text

DOCUMENTS = [f"Line {i} says {'so ' * (i % 7)}much.\n" for i in range(60)]


def prepare(folder: Path, **settings) -> Path:
    """Prepares a text of which every line is a document; see `TextSettings`."""
    for split, lines in (("train", DOCUMENTS), ("validation", DOCUMENTS[:20])):
        (folder / f"{split}.txt").write_text("".join(lines))
    options = {"tokenizer": "bytes", "document": "line", "block": 24, **settings}
    prepare_text(
        [f"{split}={folder / split}.txt" for split in ("train", "validation")],
        Settings(out=folder / "prepared", workers=1),
        TextSettings(**options),
    )
    return folder / "prepared"


class Documents(tfds.core.GeneratorBasedBuilder):
    """The same documents as a dataset; its other split is called test, as LM1B's."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples(DOCUMENTS),
            "test": self._generate_examples(DOCUMENTS[:20]),
        }

    def _generate_examples(self, documents):
        for i, text in enumerate(documents):
            yield i, {"text": text.removesuffix("\n")}
