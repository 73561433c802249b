"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", alg. 2), one's own optimizer.

PYTHONPATH=tests python train.py config/quickstart.py --optimizer=support.lion
"""

import torch

from training.optimization.optimizer import Kept, Optimizer

ITEM = "Lion's momentum (float32)"


class Lion(Optimizer):
    @classmethod
    def keeps(cls, name, shape, config):
        return {"step": Kept(ITEM, (), torch.float32), "momentum": Kept(ITEM, shape, torch.float32)}

    @classmethod
    def line(cls, config):
        return f"betas {config.beta1:g} {config.beta2:g}"

    @torch.no_grad()
    def step(self, rate, divisor, found_inf):
        self.count(self.shards, found_inf)
        for shard in self.shards:
            weight, gradient = shard.local.float(), shard.grad.float() / divisor
            momentum = self.kept(shard)["momentum"]
            far, near = (momentum + (1 - beta) * (gradient - momentum) for beta in self.betas)
            momentum.copy_(torch.where(found_inf > 0, momentum, near))
            self.write(shard, weight - rate * (far.sign() + self.decay(shard) * weight), found_inf)

    @property
    def betas(self):
        return self.config.beta1, self.config.beta2


OPTIMIZER = Lion
