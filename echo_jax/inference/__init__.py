"""The use of a trained model: loading, evaluation, prediction, export."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "evaluate": ["evaluate_run"],
        "export": ["export_run"],
        "report": ["write_evaluation"],
        "pictures": ["draw_boxes"],
        "run": ["TrainedRun", "load_run"],
    },
)
