"""Reading ahead: states are those of what was taken, and no more of them are kept."""

import pytest

from echo_jax.echo.reader import ChunkReader


class Counting:
    """Counts up, with a state that it changes in place, as a careless iterator may."""

    def __init__(self, total=100):
        self.total = total
        self.state = {"next": 0}

    def __next__(self):
        if self.state["next"] == self.total:
            raise StopIteration
        self.state["next"] += 1
        return self.state["next"] - 1

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.fixture(params=[0, 1, 3], ids="depth={}".format)
def reader(request):
    reader = ChunkReader(Counting(), lambda chunk: -chunk, depth=request.param)
    yield reader
    reader.close()


def test_a_state_is_that_before_its_chunk_however_far_was_read(reader):
    assert [reader.take() for _ in range(5)] == [0, -1, -2, -3, -4]
    assert [reader.state_before(n)["next"] for n in range(6)] == list(range(6))


def test_a_restore_leaves_the_given_state_alone_and_is_left_alone(reader):
    state = {"next": 7}
    reader.restore(state, 40)
    assert reader.take() == -7
    assert state == {"next": 7}
    state["next"] = 50
    assert reader.state_before(40) == {"next": 7}
    assert reader.take() == -8
    assert reader.state_before(42) == {"next": 9}


def test_states_of_forgotten_chunks_are_dropped(reader):
    for number in range(90):
        reader.take()
        reader.forget(number - 2)
    with pytest.raises(KeyError):
        reader.state_before(80)
    assert reader.state_before(88) == {"next": 88}


def test_an_iterator_without_a_state_is_named():
    reader = ChunkReader(iter([1, 2]), abs, depth=0)
    assert [reader.take() for _ in range(3)] == [1, 2, None]
    with pytest.raises(TypeError, match="a list_iterator, has no get_state"):
        reader.state_before(0)
