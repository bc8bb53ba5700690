"""Two arrays, ten lines: weather comes season by season, and summer must not wipe out winter."""

import numpy as np

from proxreplay import LPR, Learner
from proxreplay.models import mlp

rng = np.random.default_rng(0)
seasons = np.repeat(["winter", "spring", "summer", "autumn"], 250)  # one after the other
centres = {"winter": [0, 0, 3], "spring": [2, 1, 0], "summer": [4, 3, 0], "autumn": [2, 3, 3]}
weather = np.array([rng.normal(centres[season]) for season in seasons])  # [1000, 3]

model = mlp(in_features=3)
learner = Learner(model, rule=LPR(model, omega_0=1.0))
learner.learn_stream(weather, seasons, batch_size=10)
print(learner.predict([[0.0, 0.0, 3.0], [4.0, 3.0, 0.0]]))
print(f"accuracy {learner.evaluate(weather, seasons):.2f}")
