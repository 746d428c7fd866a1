"""Studies that search: their plan, their trials, and their comparison."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "comparison": ["ArmResult", "Searched", "is_searched", "read_search"],
        "fastest": ["best_arms", "best_arms_table", "speedup_by_clock"],
        "figures": ["mean_points", "write_search_figures"],
        "making": ["make_trials", "num_missing", "refuse_other_falsifiers"],
        "space": ["Axis", "Space"],
        "statistics": ["Interval", "expected_best", "mean_interval"],
        "table": ["write_search_markdown"],
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
