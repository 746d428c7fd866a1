"""Record sources: prepared folders and third-party datasets."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "prepared": [
            "PreparedError",
            "open_prepared",
            "pack",
            "read_info",
            "unpack",
            "verify",
        ],
        "shapes": [
            "CLASS_NAMES",
            "SHIFT_PIXELS",
            "ShapeRecords",
            "augment_shape",
            "augment_shapes",
            "decode_shape",
        ],
        "shard_files": ["find_shards", "shards_metadata"],
        "source": ["Subset", "open_source"],
        "text": ["TextWindows", "decode_window", "load_corpus"],
    },
)
