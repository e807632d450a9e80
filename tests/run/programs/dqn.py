"""Deep Q-learning on a pole that balances, in the manner of the tutorial: replay memory, target network, soft updates."""

import math
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")
random.seed(0)
torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.manual_seed(0)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class CartPole:
    """The physics of the usual environment."""

    def reset(self):
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        return list(self.state)

    def step(self, action):
        x, v, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(angle), math.sin(angle)
        temp = (force + 0.05 * turn * turn * sin) / 1.1
        accel = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        self.state = [
            x + 0.02 * v,
            v + 0.02 * (temp - 0.05 * accel * cos / 1.1),
            angle + 0.02 * turn,
            turn + 0.02 * accel,
        ]
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21
        return list(self.state), 1.0, done


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


policy_net, target_net = DQN().to(device), DQN().to(device)
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory = deque([], maxlen=1000)
env, losses = CartPole(), []
for episode in range(4):
    state = torch.tensor(env.reset(), dtype=torch.float32, device=device).unsqueeze(0)
    for t in range(20):
        if random.random() > 0.5:
            with torch.no_grad():
                action = policy_net(state).max(1).indices.view(1, 1)
        else:
            action = torch.tensor([[random.randrange(2)]], device=device, dtype=torch.long)
        observation, reward, done = env.step(action.item())
        reward = torch.tensor([reward], device=device)
        next_state = None if done else torch.tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)
        memory.append(Transition(state, action, next_state, reward))
        state = next_state
        if len(memory) >= 16:
            batch = Transition(*zip(*random.sample(memory, 16)))
            mask = torch.tensor(tuple(s is not None for s in batch.next_state), device=device, dtype=torch.bool)
            following = torch.cat([s for s in batch.next_state if s is not None])
            values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
            next_values = torch.zeros(16, device=device)
            with torch.no_grad():
                next_values[mask] = target_net(following).max(1).values
            loss = nn.SmoothL1Loss()(values, (next_values * 0.99 + torch.cat(batch.reward)).unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
            optimizer.step()
            losses.append(loss.item())
            policy, target = policy_net.state_dict(), target_net.state_dict()
            for key in policy:
                target[key] = policy[key] * 0.005 + target[key] * 0.995
            target_net.load_state_dict(target)
        if done:
            break
print(f"= first {losses[0]:.4f} fourth {losses[3]:.4f}")
assert all(map(math.isfinite, losses)) and next(policy_net.parameters()).is_cuda == torch.cuda.is_available()
