"""The order of prompts in a run: TRL's repetition, and permutations that follow from seed and epoch alone."""

from collections import Counter
from itertools import islice

from experiments.running.prompt_sampler import PromptSampler


def sampler(**changed):
    options = dict(rows=10, prompts_per_batch=4, group_size=3, uses=1, micro_batches=6, seed=0)
    return PromptSampler(**(options | changed))


def prompts(order: PromptSampler) -> list[int]:
    """The prompt of each group, once per batch."""
    rows, uses, group_size = list(order), order.uses, order.group_size
    batch = order.prompts_per_batch * group_size
    starts = range(0, len(rows), batch * uses)
    return [row for start in starts for row in rows[start : start + batch : group_size]]


def test_each_prompt_is_repeated_for_its_group_and_each_batch_for_its_uses():
    rows = list(sampler(prompts_per_batch=2, group_size=3, uses=2, micro_batches=4))
    assert len(rows) == len(sampler(prompts_per_batch=2, group_size=3, uses=2, micro_batches=4)) == 2 * 3 * 2 * 2
    first, second = rows[:6], rows[6:12]
    assert first == second  # the two uses of the first generation
    assert first[:3] == [first[0]] * 3 and first[3:] == [first[3]] * 3 and first[0] != first[3]


def test_every_epoch_shows_every_prompt_once_in_an_order_of_its_own():
    order = prompts(sampler(micro_batches=5))  # 20 prompts of 10 rows: two epochs, the third batch spans both
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


def test_more_steps_continue_the_same_order():
    assert prompts(sampler(micro_batches=50))[:24] == prompts(sampler(micro_batches=6))


def test_group_size_does_not_change_the_prompts():
    assert prompts(sampler(group_size=8)) == prompts(sampler(group_size=1))


def test_every_seed_has_an_order_of_its_own():
    orders = {tuple(islice(prompts(sampler(seed=seed)), 10)) for seed in range(20)}
    assert len(orders) == 20


def test_over_many_epochs_every_prompt_is_seen_equally_often():
    counts = Counter(prompts(sampler(micro_batches=25)))
    assert set(counts.values()) == {10}
