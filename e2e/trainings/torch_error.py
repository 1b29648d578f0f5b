"""A rank that fails the way torchrun wants to be told: with what it writes into TORCHELASTIC_ERROR_FILE."""

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    raise ValueError("the third sample is no text")


main()
