"""SkyRL's RL entry point with nothing but the inference engine replaced: its ``trainer.override_entrypoint``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp, validate_cfg
from skyrl.train.utils.utils import initialize_ray

from tests.trainers import tiny


class Engine:
    """It answers what tiny.answer says. Whatever else SkyRL tells an engine to do is done at once."""

    model_name, data_parallel_size, weight_version = "stand-in", 1, 0
    server_urls = ("http://127.0.0.1:9",)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        answers = [self._answer(tuple(prompt)) for prompt in input_batch["prompt_token_ids"]]
        return {
            "responses": [self.tokenizer.decode(answer) for answer in answers],
            "response_ids": answers,
            "stop_reasons": ["stop"] * len(answers),
            "response_logprobs": [[-5.0] * len(answer) for answer in answers],
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
            "rollout_sample_support": None,
        }

    def _answer(self, prompt: tuple[int, ...]) -> list[int]:
        self.asked[prompt] += 1
        return tiny.answer(prompt, self.asked[prompt])

    async def is_sleeping(self) -> bool:
        return False

    async def get_world_size(self) -> tuple[int, None]:
        return 2, None

    def increment_weight_version(self) -> None:
        self.weight_version += 1

    def get_endpoint_url(self) -> str:
        return self.server_urls[0]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def done(*_: Any, **__: Any) -> None: ...

        return done


class Experiment(BasePPOExp):
    def get_inference_client(self) -> Engine:
        return Engine(self.tokenizer)


@ray.remote(num_cpus=1)
def train(configuration: SkyRLTrainConfig) -> None:
    Experiment(configuration).run()


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("trainer.override_entrypoint=")]
    configuration = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(configuration)
    initialize_ray(configuration)
    ray.get(train.remote(configuration))
