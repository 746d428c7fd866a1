"""Studies that search: their plan, their trials, and their comparison."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "comparison": ["Searched", "VariantResult", "is_searched", "read_search"],
        "fastest": ["best_variants", "fastest_report", "speedup_by_clock"],
        "figures": ["mean_points"],
        "making": ["make_trials", "num_missing", "refuse_other_predictions"],
        "space": ["Axis", "Space"],
        "statistics": ["Interval", "expected_best", "mean_interval"],
        "table": ["search_report"],
        "trials": [
            "Protocol",
            "Trial",
            "Unit",
            "best_of",
            "crossing",
            "protocol_of",
            "read_environments",
            "read_unit",
            "write_unit",
        ],
        "workers": ["LostWorkerError", "run_search"],
    },
)
