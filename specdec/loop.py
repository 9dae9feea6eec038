"""The decode loop: plan, run the network over one window, choose, commit."""

import torch
from torch import Tensor

from specdec.errors import EngineError
from specdec.models.network import Network
from specdec.outputs import TokenLogprob
from specdec.scheduler import Scheduler, Share, StepPlan
from specdec.state_slots.arena import Arena
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window
from specdec.verify.choose import NO_TOKEN, Choice, Node, choose


class DecodeLoop:
    """Owns the network, the arena and the scheduler; one thread steps it."""

    def __init__(self, network: Network, arena: Arena, scheduler: Scheduler, device: torch.device) -> None:
        self.network, self.arena, self.scheduler, self.device = network, arena, scheduler, device
        self.conv_width = max((s.conv_inputs + 1 for s in arena.layout.states), default=1)

    @torch.inference_mode()
    def step(self) -> None:
        """Advance every request that takes part by one window."""
        plan = self.scheduler.plan()
        if not plan.shares:
            return
        window = build_window([self._row(share) for share in plan.shares], self.conv_width, self.device)
        hidden_TD = self.network.forward(window, self.arena)
        self._commit(plan)
        self._choose(plan, window, hidden_TD)

    def _row(self, share: Share) -> Row:
        request = share.request
        tokens = request.tokens[request.computed : request.computed + share.count]
        return Row(
            tree=TokenTree.chain(tokens),
            length=request.computed,
            table_N=request.table_N,
            state=request.state or 0,
        )

    def _commit(self, plan: StepPlan) -> None:
        for share in plan.shares:
            share.request.computed += share.count

    def _choose(self, plan: StepPlan, window: Window, hidden_TD: Tensor) -> None:
        """Give each request that has read all its tokens the next one."""
        ready = [i for i, share in enumerate(plan.shares) if share.request.owed == 0]
        if not ready:
            return
        last = [window.first_B[i] + plan.shares[i].count - 1 for i in ready]
        if last != list(range(len(hidden_TD))):
            hidden_TD = hidden_TD[torch.tensor(last, device=self.device)]
        requests = [plan.shares[i].request for i in ready]
        nodes = [Node(request.chooser, position=len(request.tokens)) for request in requests]
        choices = choose(self.network.logits(hidden_TD), nodes, self.network.kernels)
        for request, choice in zip(requests, choices, strict=True):
            if choice.token == NO_TOKEN:
                self.scheduler.release(request)
                request.fail(EngineError("The model's logits for this request are not numbers (NaN)."))
                continue
            delta = request.accept([(choice.token, _logprob(choice))])
            if delta.finish_reason:
                # What has ended gives its memory back before anyone hears of it.
                self.scheduler.release(request)
            request.send(delta)


def _logprob(choice: Choice) -> TokenLogprob | None:
    if choice.logprob is None:
        return None
    return TokenLogprob(choice.token, choice.logprob.chosen, choice.logprob.top)
