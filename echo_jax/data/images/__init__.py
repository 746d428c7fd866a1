"""Images on the host: decoding and augmentation."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "decode": [
            "decode_image",
            "pad_crop_flip",
            "random_resized_crop",
            "resize_center_crop",
        ],
        "host_augment": ["HostAugment", "OnImage", "choose_stages", "flip"],
        "host_colour": ["change_colours", "distort_colours"],
    },
)
