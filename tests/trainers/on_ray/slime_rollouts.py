"""``slime_rollouts.py DIRECTORY COUNT SAMPLES``: rollouts as slime's ``--save-debug-rollout-data`` writes them."""

import random
import sys

import torch
from slime.utils.types import Sample


def sample(number: int, draw: random.Random) -> Sample:
    asked, answered = draw.randint(8, 16), draw.randint(16, 48)
    return Sample(
        group_index=number // 4,
        index=number,
        rollout_id=number,
        prompt="asked",
        tokens=[draw.randrange(256) for _ in range(asked + answered)],
        response="answered",
        response_length=answered,
        reward=float(draw.randint(0, 1)),
        loss_mask=[1] * answered,
        status=Sample.Status.COMPLETED,
        rollout_log_probs=[-5.0] * answered,
    )


if __name__ == "__main__":
    directory, count, samples = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for rollout in range(count):
        draw = random.Random(rollout)
        found = [sample(rollout * samples + number, draw).to_dict() for number in range(samples)]
        torch.save({"samples": found}, f"{directory}/rollout_{rollout}.pt")
