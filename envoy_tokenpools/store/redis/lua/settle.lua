--[[
settle: end a lease and charge in place of what was reserved; mirrors `Ledger.settle`.

Arguments: lease id, tokens.
Reply:     {lease, charged tokens, held for ms, is late}, or false if it is not known (any more).

Invariants: a lease is settled once; one that expired is only charged; a charge beyond OVERCHARGE times what the pool can
process in the time is not believed.
]]
operations.settle = function(op)
  local id, tokens = op[2], op[3]
  local pool, lease = books.pool, leases.find(op[2])
  local late = not lease
  if late then
    lease = leases.recall(id)
    if not lease then
      return false
    end
  end
  local a = books.find(lease.entitlement)
  books.happen(a)
  account.drain(a)
  bucket.drain(pool.tokens, books.now)
  local held, reserved = max(0, books.now - lease.at), lease.prompt + lease.output
  tokens = min(tokens, reserved + OVERCHARGE * floor(pool.best_rate * (held + pool.tokens.window) / 1000))
  leases.charge(lease, a, reserved, tokens)
  a.demanded = a.demanded + tokens - reserved
  a.delivered = a.delivered + tokens - reserved
  if not late then
    if not lease.freeing then -- else its end was not its own
      local before = pool.mean_us or held * 1000
      pool.mean_us = before + floor((held * 1000 - before) / HOLD_PART)
    end
    if lease.within_guarantee then
      withheld.rest(a, lease)
    end
    leases.remove(id, lease, a)
  end
  return {leases.shown(id, lease), tokens, held, late}
end
