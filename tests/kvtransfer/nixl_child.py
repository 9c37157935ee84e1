"""A decode worker's pool in another process: `python nixl_child.py LAYERS PAGES PAGE_BYTES INCARNATION DEVICE`.

Says the descriptor of an export in its first line; then answers each line on stdin: `pool` by the pool's bytes,
`renew` by the descriptor of a new export, once the old one is closed.
"""

import sys

import torch

from twostroke.kvtransfer.nixl_export import NixlExport


def main(layers: int, pages: int, page_bytes: int, incarnation: int, device: str) -> None:
    """Until stdin ends."""
    pool = torch.zeros(layers * pages * page_bytes, dtype=torch.uint8, device=device)
    export = NixlExport(pool, incarnation)
    print(export.descriptor.hex(), flush=True)
    for line in sys.stdin:
        if line.strip() == "renew":
            export.close()
            export = NixlExport(pool, incarnation)
            print(export.descriptor.hex(), flush=True)
        else:
            print(bytes(pool.cpu().numpy()).hex(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), sys.argv[5])
