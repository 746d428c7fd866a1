"""The stages of a pipeline, and the engines that run them with an echo."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "dataset": ["fresh_batches", "train_dataset"],
        "evaluation": ["eval_batches", "sample_indices", "stream_eval_batches"],
        "grain_engine": ["FreshTime"],
        "shard": ["DataShard", "SINGLE"],
        "spec": ["PipelineSpec"],
        "stages": ["Stages"],
        "storage": ["SimulatedStorage", "StorageSpec"],
    },
)
