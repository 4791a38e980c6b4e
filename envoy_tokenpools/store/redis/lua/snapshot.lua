--[[
snapshot: what is in use, for gauges and pages; mirrors `Ledger.view`.

Arguments: none.
Reply:     {{leases, sequences, KV bytes}, list of {entitlement, leases, sequences, reserved tokens, KV bytes}}, of those
           that use something.
]]
operations.snapshot = function()
  local pool, each = books.pool, {}
  for _, name in ipairs(call('SMEMBERS', KEY.active)) do
    local a = books.find(name)
    if a.in_flight > 0 then
      each[#each + 1] = {name, a.in_flight, a.concurrency, a.reserved, a.kv}
    end
  end
  return {{pool.in_flight, pool.concurrency, pool.kv}, each}
end
