import torch

from twostroke.kernels.gpu.state import keep_tokens, set_table


def test_pages_and_tokens_go_to_their_slots(device):
    tables = torch.zeros(5, 7, dtype=torch.int32, device=device)
    last_tokens = torch.zeros(5, dtype=torch.int64, device=device)
    updates = [(1, 0, 9), (4, 6, 11), (3, -1, 123_456), (2, 3, 8), (0, 0, 0), (0, 0, 0)]
    set_table(tables, last_tokens, torch.tensor(updates, dtype=torch.int32, device=device))
    expected = torch.zeros(5, 7, dtype=torch.int32)
    expected[1, 0], expected[4, 6], expected[2, 3] = 9, 11, 8
    assert torch.equal(tables.cpu(), expected)
    assert last_tokens.tolist() == [0, 0, 0, 123_456, 0]


def test_many_updates_at_once(device):
    tables = torch.full((40, 50), -1, dtype=torch.int32, device=device)
    places = torch.randperm(2000, generator=torch.Generator().manual_seed(0))[:777]
    pages = torch.arange(777)
    updates = torch.stack((places // 50, places % 50, pages), dim=1).to(torch.int32)
    set_table(tables, torch.zeros(40, dtype=torch.int64, device=device), updates.to(device))
    expected = torch.full((2000,), -1, dtype=torch.int32)
    expected[places] = pages.to(torch.int32)
    assert torch.equal(tables.cpu().view(-1), expected)


def test_no_update_changes_nothing(device):
    tables = torch.full((2, 2), 3, dtype=torch.int32, device=device)
    last_tokens = torch.full((2,), 4, device=device)
    set_table(tables, last_tokens, torch.zeros(0, 3, dtype=torch.int32, device=device))
    told = torch.full((2, 3), 6, device=device)
    none, turn = torch.zeros(0, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    keep_tokens(last_tokens, none, torch.zeros(0, dtype=torch.int64, device=device), told, turn)
    assert (told == 6).all()
    assert (tables == 3).all()
    assert (last_tokens == 4).all()


def test_drawn_tokens_are_kept_by_slot_and_padding_is_not(device):
    slots = torch.zeros(300, dtype=torch.int32)
    slots[:257] = torch.randperm(299, generator=torch.Generator().manual_seed(2))[:257] + 1
    tokens = torch.arange(300) + (1 << 33)
    last_tokens = torch.full((301,), -5, device=device)
    last_tokens[0] = 0
    told = torch.full((4, 310), -7, pin_memory=device.type == "cuda")  # the device writes into the host's memory
    turn = torch.full((1,), 2, dtype=torch.int32, device=device)
    keep_tokens(last_tokens, slots.to(device), tokens.to(device), told, turn)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert told[2, :300].tolist() == tokens.tolist()
    told[2, :300] = -7
    assert (told == -7).all()
    expected = torch.full((301,), -5)
    expected[0] = 0
    expected[slots[:257].long()] = tokens[:257]
    assert torch.equal(last_tokens.cpu(), expected)
