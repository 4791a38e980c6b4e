--[[
What an entitlement may use, put in force; mirrors the part of `core/ledger.py` about terms.

Terms are {rank, weight, evictable, withheld_ppm, guarantee, share, limits}; resources are {tokens per second, KV bytes,
concurrency}, where a limit of -1 is none.
]]
local terms = {}

local NOTHING = {0, 0, 0}

-- As they come from a caller.
function terms.read(t)
  return {
    rank = t[1], weight = t[2], evictable = t[3], withheld_ppm = t[4],
    guarantee = t[5], share = t[6], limits = t[7],
  }
end

function terms.apply(a, wanted, window)
  local now, pool = books.now, books.pool
  pool.withheld_rate = pool.withheld_rate + withheld.rate_of(wanted) - withheld.rate_of(a.terms)
  a.terms = wanted
  bucket.set_rate(a.share, wanted.share[1], window, now)
  bucket.set_rate(a.guarantee, wanted.guarantee[1], window, now)
  if a.share.rate == 0 then
    a.share.used = 0
  end
  if a.guarantee.rate == 0 then
    a.guarantee.used = 0
  end
  local limit = wanted.limits[1]
  if limit < 0 then
    a.limit = nil
  elseif a.limit then
    bucket.set_rate(a.limit, limit, window, now)
  else
    a.limit = bucket.new(limit, window, now)
  end
  withheld.update(a)
  books.change(a)
end

-- The terms of an entitlement that is gone.
function terms.withdrawn(old)
  return {
    rank = old.rank, weight = old.weight, evictable = old.evictable, limits = old.limits,
    withheld_ppm = old.withheld_ppm, guarantee = NOTHING, share = NOTHING,
  }
end

-- The page of an entitlement, opened if need be; whether its terms are in force is another matter.
function terms.open(name, wanted, window)
  local a = books.find(name)
  if a then
    return a
  end
  a = {
    name = name, terms = terms.withdrawn(wanted), published = false, active = false,
    share = bucket.new(0, window, books.now), guarantee = bucket.new(0, 0, 0),
    in_flight = 0, concurrency = 0, kv = 0, reserved = 0,
    withheld_sequences = 0, withheld_kv = 0, resting_concurrency = 0, resting_kv = 0,
    touched = 0, sheds = 0, expired = 0,
    demanded = 0, delivered = 0, pending_tokens = 0, pending_kv = 0, pending_concurrency = 0,
    peak_concurrency = 0, peak_kv = 0, sequence_ms = 0, kv_byte_ms = 0,
  }
  books.add(a)
  terms.apply(a, wanted, window)
  return a
end

local function is_same(one, other)
  return one[1] == other[1] and one[2] == other[2] and one[3] == other[3]
end

local function are_in_force(a, wanted, window)
  local now = a.terms
  return a.share.window == window and now.rank == wanted.rank and now.weight == wanted.weight
    and now.evictable == wanted.evictable and now.withheld_ppm == wanted.withheld_ppm
    and is_same(now.guarantee, wanted.guarantee) and is_same(now.share, wanted.share)
    and is_same(now.limits, wanted.limits)
end

-- Put terms in force unless they are.
function terms.agree(a, wanted, window)
  if not are_in_force(a, wanted, window) then
    terms.apply(a, wanted, window)
  end
end

-- What is withheld of the token rate is never in the bucket that everybody shares.
function terms.set_usable(usable, window)
  local pool = books.pool
  pool.usable = usable
  pool.best_rate = max(pool.best_rate, usable[1])
  bucket.set_rate(pool.tokens, max(0, usable[1] - pool.withheld_rate), window, books.now)
end
