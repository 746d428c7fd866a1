import pytest

from echo_jax.training.clock import Clock


def test_every_second_is_in_one_phase():
    time = [100.0]
    clock = Clock(now=lambda: time[0])
    time[0] += 5  # Start-up is a pause.
    with clock.phase("train"):
        time[0] += 1
        with clock.phase("wait"):
            time[0] += 20
            assert clock.seconds()["wait_s"] == 20
        time[0] += 2
        with clock.phase("pause"):
            time[0] += 40
    time[0] += 7
    assert clock.seconds() == {
        "wall_s": 23,
        "train_s": 3,
        "wait_s": 20,
        "pause_s": 52,
    }


def test_an_error_leaves_its_phase():
    time = [0.0]
    clock = Clock(now=lambda: time[0])
    with pytest.raises(KeyError), clock.phase("wait"):
        raise KeyError
    time[0] += 3
    assert clock.seconds()["pause_s"] == 3


def test_adds_earlier_sittings():
    time = [0.0]
    clock = Clock(now=lambda: time[0])
    clock.add({"wall_s": 5.0, "train_s": 3.0, "wait_s": 2.0, "pause_s": 1.0})
    with clock.phase("train"):
        time[0] += 4
    assert clock.seconds() == {
        "wall_s": 9,
        "train_s": 7,
        "wait_s": 2,
        "pause_s": 1,
    }
