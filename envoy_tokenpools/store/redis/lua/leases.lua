--[[
The live leases and their orders; mirrors the dictionaries of `core/ledger.py`, and `core/evictions.py`.

KEY.leases     lease id -> lease
KEY.expiry     lease id by the time of its expiry
KEY.taken      lease id by order of admission
KEY.held       `account:order:lease id`, to find an entitlement's oldest
KEY.evictable  `rank:order:lease id` of those that may be taken back and were not told yet
KEY.freeing    `owner:lease id` of those that were told to end and have not
KEY.expired    lease id -> lease, of those that were not renewed; KEY.expired_order keeps them in order

A lease that was told to end counts as free from then on, though it holds its capacity until it is settled or expires.
]]
local leases = {}

local ORDERED = '%016.0f'

function leases.find(id)
  local page = call('HGET', KEY.leases, id)
  return page and unpack_(page) or nil
end

function leases.write(id, lease)
  call('HSET', KEY.leases, id, pack(lease))
end

local function evictable_member(id, lease)
  return lease.rank .. ':' .. lease.order .. ':' .. id
end

-- Hold a lease; its account is given and changed.
function leases.add(id, lease, a)
  local pool = books.pool
  pool.taken = pool.taken + 1
  lease.order = string.format(ORDERED, pool.taken)
  lease.freeing = false
  leases.write(id, lease)
  call('ZADD', KEY.expiry, lease.expires, id)
  call('ZADD', KEY.taken, pool.taken, id)
  call('ZADD', KEY.held, 0, a.no .. ':' .. lease.order .. ':' .. id)
  if lease.rank >= 0 then
    call('ZADD', KEY.evictable, 0, evictable_member(id, lease))
    pool.evictable = pool.evictable + 1
  end
  pool.in_flight = pool.in_flight + 1
  pool.concurrency = pool.concurrency + lease.concurrency
  pool.kv = pool.kv + lease.kv
  account.hold(a, lease, 1)
end

-- Hold it no more.
function leases.remove(id, lease, a)
  local pool = books.pool
  call('HDEL', KEY.leases, id)
  call('ZREM', KEY.expiry, id)
  call('ZREM', KEY.taken, id)
  call('ZREM', KEY.held, a.no .. ':' .. lease.order .. ':' .. id)
  if lease.freeing then
    call('ZREM', KEY.freeing, lease.owner .. ':' .. id)
    pool.freeing_leases = pool.freeing_leases - 1
    pool.freeing_concurrency = pool.freeing_concurrency - lease.concurrency
    pool.freeing_kv = pool.freeing_kv - lease.kv
  elseif lease.rank >= 0 then
    call('ZREM', KEY.evictable, evictable_member(id, lease))
    pool.evictable = pool.evictable - 1
  end
  pool.in_flight = pool.in_flight - 1
  pool.concurrency = pool.concurrency - lease.concurrency
  pool.kv = pool.kv - lease.kv
  account.hold(a, lease, -1)
end

-- Charge `tokens` in place of `charged` before.
function leases.charge(lease, a, charged, tokens)
  account.charge(a, lease, tokens - charged)
  local part = floor(tokens * lease.pool_ppm / WHOLE_PPM) - floor(charged * lease.pool_ppm / WHOLE_PPM)
  bucket.take(books.pool.tokens, part)
end

function leases.expire(id, lease, a)
  leases.remove(id, lease, a)
  call('HSET', KEY.expired, id, pack(lease))
  books.pool.taken = books.pool.taken + 1
  call('ZADD', KEY.expired_order, books.pool.taken, id)
  a.expired = a.expired + 1
  books.pool.expired = books.pool.expired + 1
  if call('ZCARD', KEY.expired_order) > MAX_EXPIRED then
    leases.recall(call('ZRANGE', KEY.expired_order, 0, 0)[1])
  end
end

-- The lease of this id, if it expired and was remembered; it is no longer.
function leases.recall(id)
  local page = call('HGET', KEY.expired, id)
  if not page then
    return nil
  end
  call('HDEL', KEY.expired, id)
  call('ZREM', KEY.expired_order, id)
  local lease = unpack_(page)
  local a = books.find(lease.entitlement)
  a.expired = a.expired - 1
  books.pool.expired = books.pool.expired - 1
  books.change(a)
  return lease
end

local function wait_from(oldest, in_flight, ahead)
  local pool = books.pool
  local hold_us, oldest_ms = pool.mean_us, 0
  if oldest then
    oldest_ms = max(0, books.now - oldest.at)
    if not hold_us then
      local rate = pool.usable[1] * oldest.concurrency
      local guess = floor(oldest.output * 1000 * pool.usable[3] / max(1, rate))
      hold_us = 1000 * max(DEFAULT_HOLD_MS, oldest_ms, min(MAX_GUESSED_HOLD_MS, guess))
    end
  elseif not hold_us or hold_us == 0 then
    hold_us = DEFAULT_HOLD_MS * 1000
  end
  local step = floor(hold_us / max(1, in_flight))
  local first = max(hold_us - oldest_ms * 1000, step)
  return max(1, floor((first + step * max(0, ahead - 1) + 500) / 1000))
end

-- When a lease of the pool is expected to end for whoever has `ahead` others before it; mirrors `core/holds.py`.
function leases.pool_wait(ahead)
  local id = call('ZRANGE', KEY.taken, 0, 0)[1]
  return wait_from(id and leases.find(id), books.pool.in_flight, ahead)
end

-- The same of an entitlement's own.
function leases.own_wait(a, ahead)
  local oldest = nil
  if a.in_flight > 0 then
    local member = call('ZRANGEBYLEX', KEY.held, '[' .. a.no .. ':', '(' .. a.no .. ';', 'LIMIT', 0, 1)[1]
    oldest = leases.find(member:sub(#a.no + 19))
  end
  return wait_from(oldest, a.in_flight, ahead)
end

-- The ids of the leases to end so that so much comes free; what is being freed already counts.
function leases.take_back(sequences, kv)
  local pool, victims, start = books.pool, {}, 0
  sequences, kv = sequences - pool.freeing_concurrency, kv - pool.freeing_kv
  local rank = 0
  while rank <= MAX_RANK and (sequences > 0 or kv > 0) do
    local members = call('ZREVRANGEBYLEX', KEY.evictable, '(' .. rank .. ';', '[' .. rank .. ':', 'LIMIT', start, 32)
    for _, member in ipairs(members) do
      if sequences <= 0 and kv <= 0 then
        break
      end
      local id = member:sub(20)
      local lease = leases.find(id)
      if (sequences > 0 and lease.concurrency > 0) or (kv > 0 and lease.kv > 0) then
        victims[#victims + 1] = {id, lease, member}
        sequences, kv = sequences - lease.concurrency, kv - lease.kv
      end
    end
    if #members < 32 then
      rank, start = rank + 1, 0
    else
      start = start + 32
    end
  end
  local ids = {}
  for i, victim in ipairs(victims) do
    local id, lease = victim[1], victim[2]
    lease.freeing = true
    leases.write(id, lease)
    call('ZREM', KEY.evictable, victim[3])
    pool.evictable = pool.evictable - 1
    call('ZADD', KEY.freeing, 0, lease.owner .. ':' .. id)
    pool.freeing_leases = pool.freeing_leases + 1
    pool.freeing_concurrency = pool.freeing_concurrency + lease.concurrency
    pool.freeing_kv = pool.freeing_kv + lease.kv
    ids[i] = id
  end
  return ids, victims
end

-- As it is told to the caller.
function leases.shown(id, lease)
  return {
    id, lease.entitlement, lease.prompt, lease.output, lease.kv, lease.concurrency, lease.within_share,
    lease.within_guarantee, lease.tokens_guaranteed, lease.pool_ppm, lease.at, lease.expires, lease.rank,
    lease.shadowed or false,
  }
end
