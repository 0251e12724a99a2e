"""Why a step took as long as it did: findings with their culprits."""
