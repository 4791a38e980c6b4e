--[[
renew: keep leases alive; mirrors `Ledger.renew`.

Arguments: lease ids, time to live in ms.
Reply:     {ids that are not held, ids that are to be ended}.

restore: hold leases again whose requests run on though the books have lost them; mirrors `Ledger.restore`.

Arguments: list of {lease as it was told, held for ms}, time to live in ms.
Reply:     true.

sweep: take back leases whose owner is gone, at most MAX_SWEPT at once; mirrors `Ledger.sweep`.

Arguments: none.
Reply:     list of leases.

Invariants: a lease never expires earlier than it was promised; what is restored is charged only if nothing is known of
it; tokens of expired leases stay charged.
]]
operations.renew = function(op)
  local missing, freeing, till = {}, {}, books.now + op[3]
  for _, id in ipairs(op[2]) do
    local lease = leases.find(id)
    if not lease then
      missing[#missing + 1] = id
    else
      if lease.freeing then
        freeing[#freeing + 1] = id
      end
      if lease.expires < till then
        lease.expires = till
        leases.write(id, lease)
        call('ZADD', KEY.expiry, till, id)
      end
    end
  end
  return {missing, freeing}
end

local NO_LIMITS = {-1, -1, -1}

local function restore_one(id, lease)
  local held = leases.find(id)
  if held then
    operations.renew({'renew', {id}, lease.expires - books.now})
    return
  end
  local is_charged = leases.recall(id) ~= nil
  local a = terms.open(lease.entitlement, {
    rank = 0, weight = 0, evictable = false, withheld_ppm = 0,
    guarantee = {0, 0, 0}, share = {0, 0, 0}, limits = NO_LIMITS,
  }, books.pool.tokens.window)
  books.happen(a)
  account.drain(a)
  bucket.drain(books.pool.tokens, books.now)
  leases.add(id, lease, a)
  if not is_charged then
    leases.charge(lease, a, 0, lease.prompt + lease.output)
    account.count_admitted(a, '0', lease)
  end
end

operations.restore = function(op)
  for _, survivor in ipairs(op[2]) do
    local l, held = survivor[1], survivor[2]
    restore_one(l[1], {
      entitlement = l[2], prompt = l[3], output = l[4], kv = l[5], concurrency = l[6], within_share = l[7],
      within_guarantee = l[8], tokens_guaranteed = l[9], pool_ppm = l[10],
      at = books.now - held, expires = books.now + op[3], rank = l[13], shadowed = l[14] or nil,
      owner = request.owner,
    })
  end
  return true
end

operations.sweep = function()
  local swept = {}
  for _, id in ipairs(call('ZRANGEBYSCORE', KEY.expiry, '-inf', books.now, 'LIMIT', 0, MAX_SWEPT)) do
    local lease = leases.find(id)
    local a = books.find(lease.entitlement)
    books.happen(a)
    leases.expire(id, lease, a)
    swept[#swept + 1] = leases.shown(id, lease)
  end
  return swept
end
