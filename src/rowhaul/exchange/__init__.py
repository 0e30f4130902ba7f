"""Carries out plans: rows travel between ranks as the schedule says, over ``torch.distributed``."""
