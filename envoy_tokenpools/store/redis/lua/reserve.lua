--[[
reserve: take a claim's cost, or say why not (rules 4 and 5 of admission); mirrors `Ledger.reserve` and `reclaim`.

Arguments: lease id, {entitlement, terms, usable, window} (in force only where nothing was published), cost, time to live
           in ms, fingerprint, is a retry, is enforced.
Reply:     {lease or false, refusal or false, balance, ids of leases to end}.

Invariants: a refusal takes nothing; the same lease id twice is one lease and ends nobody; each lease that is to be ended
is named once, and its owner is told on the channel as well.
]]
local function account_of(name, offered)
  local pool = books.pool
  local a = books.find(name)
  if not a or not a.published then
    local wanted = terms.read(offered[1])
    a = terms.open(name, wanted, offered[3])
    terms.agree(a, wanted, offered[3])
  end
  if pool.published then
    terms.set_usable(pool.usable, pool.tokens.window)
  else
    terms.set_usable(offered[2], offered[3])
  end
  withheld.end_rests()
  account.drain(a)
  return a
end

local function balance_of(a)
  local pool, b = books.pool, a.limit
  if not b then
    b = a.share.rate > 0 and a.share or pool.tokens
  end
  local limit = a.terms.limits[3]
  if limit < 0 then
    limit = a.concurrency + max(0, pool.usable[3] - pool.concurrency - withheld.sequences_from(a))
  end
  local free = max(0, limit - a.concurrency)
  return {
    floor(b.rate * b.window / 1000), bucket.remaining(b), b.rate > 0 and ceil(b.used / b.rate) or 0,
    limit, free, free > 0 and 0 or leases.own_wait(a, 0),
  }
end

local function tell_owners(victims)
  local others = {}
  for _, victim in ipairs(victims) do
    if victim[2].owner ~= request.owner then
      others[#others + 1] = victim[1]
    end
  end
  if #others > 0 then
    -- A user who may not publish is told when it looks.
    redis.pcall('PUBLISH', request.channel, pack(others))
  end
end

operations.reserve = function(op)
  local id, name, offered, ttl, fingerprint, is_retry, enforce = op[2], op[3], op[4], op[6], op[7], op[8], op[9]
  local cost = {prompt = op[5][1], output = op[5][2], kv = op[5][3], concurrency = op[5][4]}
  local held = leases.find(id)
  if held then
    return {leases.shown(id, held), false, balance_of(books.find(held.entitlement)), {}}
  end
  local a = account_of(name, offered)
  books.happen(a)
  local within_share = judging.fits_share(a, cost)
  local within_guarantee = judging.fits_guarantee(a, cost)
  local tokens_guaranteed = a.guarantee.rate > 0 and bucket.fits(a.guarantee, cost.prompt + cost.output)
  local refusal = judging.own_refusal(a, cost)
  if not refusal and not within_guarantee then
    refusal = judging.pool_refusal(a, cost, fingerprint, within_share, tokens_guaranteed)
  end
  local is_full = a.in_flight >= MAX_LEASES_PER_ENTITLEMENT
  if is_full then
    refusal = judging.too_many_leases(a, cost)
  end
  if refusal and (enforce or is_full) then
    account.count_shed(a, fingerprint, cost, is_retry)
    return {false, refusal, balance_of(a), {}}
  end
  leases.recall(id)
  local lease = {
    entitlement = name, prompt = cost.prompt, output = cost.output, kv = cost.kv, concurrency = cost.concurrency,
    within_share = within_share, within_guarantee = within_guarantee, tokens_guaranteed = tokens_guaranteed,
    pool_ppm = WHOLE_PPM - (tokens_guaranteed and a.terms.withheld_ppm or 0),
    at = books.now, expires = books.now + ttl,
    rank = a.terms.evictable and enforce and a.terms.rank or -1,
    shadowed = refusal, owner = request.owner,
  }
  leases.add(id, lease, a)
  leases.charge(lease, a, 0, cost.prompt + cost.output)
  account.count_admitted(a, fingerprint, cost)
  refusals.admitted(name, fingerprint)
  local balance, ids, victims = balance_of(a), {}, nil
  if within_guarantee and enforce then
    local pool = books.pool
    ids, victims = leases.take_back(pool.concurrency - pool.usable[3], pool.kv - pool.usable[2])
    tell_owners(victims)
  end
  return {leases.shown(id, lease), false, balance, ids}
end
