"""What a run is told: the keys, their rules, and how a config file and flags become one checked TrainConfig.
May import model_config.py and common/, and nothing else of ours."""
