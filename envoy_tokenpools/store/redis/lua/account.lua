--[[
One entitlement's page: what it holds and did; mirrors `core/account.py`.

`KEY.sheds` maps `account:fingerprint` to a shed request, `KEY.shed_order`
holds `account:sequence:fingerprint`, in order of first sight.
]]
local account = {}

local ORDERED = '%016.0f'

local function buckets_of(a)
  return a.limit and {a.share, a.guarantee, a.limit} or {a.share, a.guarantee}
end

function account.drain(a)
  for _, b in ipairs(buckets_of(a)) do
    bucket.drain(b, books.now)
  end
end

local function integrate(a)
  local elapsed = books.now - a.touched
  if elapsed > 0 then
    a.touched = books.now
    a.sequence_ms = a.sequence_ms + a.concurrency * elapsed
    a.kv_byte_ms = a.kv_byte_ms + a.kv * elapsed
  end
end

-- Take (sign 1) or give back (-1) what a lease holds while it lives.
function account.hold(a, lease, sign)
  integrate(a)
  a.in_flight = a.in_flight + sign
  a.concurrency = a.concurrency + sign * lease.concurrency
  a.kv = a.kv + sign * lease.kv
  a.reserved = a.reserved + sign * (lease.prompt + lease.output)
  a.peak_concurrency = max(a.peak_concurrency, a.concurrency)
  a.peak_kv = max(a.peak_kv, a.kv)
  withheld.update(a)
end

-- Take tokens from the buckets, or give them back when negative.
function account.charge(a, lease, tokens)
  if lease.within_share then
    bucket.take(a.share, tokens)
  end
  if lease.tokens_guaranteed then
    bucket.take(a.guarantee, tokens)
  end
  if a.limit then
    bucket.take(a.limit, tokens)
  end
end

local function pend(a, cost, sign)
  a.pending_tokens = a.pending_tokens + sign * (cost.prompt + cost.output)
  a.pending_kv = a.pending_kv + sign * cost.kv
  a.pending_concurrency = a.pending_concurrency + sign * cost.concurrency
end

local function find_shed(a, fingerprint)
  if fingerprint == '0' or a.sheds == 0 then
    return nil
  end
  local page = call('HGET', KEY.sheds, a.no .. ':' .. fingerprint)
  return page and unpack_(page) or nil
end

local function write_shed(a, fingerprint, shed)
  call('HSET', KEY.sheds, a.no .. ':' .. fingerprint, pack(shed))
end

local function drop_shed(a, fingerprint, order)
  call('HDEL', KEY.sheds, a.no .. ':' .. fingerprint)
  call('ZREM', KEY.shed_order, a.no .. ':' .. order .. ':' .. fingerprint)
  a.sheds = a.sheds - 1
  books.pool.sheds = books.pool.sheds - 1
end

-- The fingerprint and order of the shed request that was seen first.
local function first_shed(a)
  local member = call('ZRANGEBYLEX', KEY.shed_order, '[' .. a.no .. ':', '(' .. a.no .. ';', 'LIMIT', 0, 1)[1]
  return member:sub(#a.no + 19), member:sub(#a.no + 2, #a.no + 17)
end

-- Meter an admitted request; one shed earlier in this tick is no longer pending, nor new demand.
function account.count_admitted(a, fingerprint, cost)
  local tokens, ticks = cost.prompt + cost.output, books.pool.ticks
  a.delivered = a.delivered + tokens
  local shed = find_shed(a, fingerprint)
  if shed then
    drop_shed(a, fingerprint, shed.order)
    if shed.pending_tick == ticks then
      pend(a, shed, -1)
    end
  end
  if not shed or shed.counted_tick ~= ticks then
    a.demanded = a.demanded + tokens
  end
end

-- Meter a shed request: it pends once per tick, and is demanded once per RETRY_WINDOW_MS.
function account.count_shed(a, fingerprint, cost, is_retry)
  local ticks = books.pool.ticks
  local shed = find_shed(a, fingerprint)
  if shed and books.now - shed.first < RETRY_WINDOW_MS then
    if shed.pending_tick ~= ticks then
      shed.pending_tick = ticks
      write_shed(a, fingerprint, shed)
      pend(a, cost, 1)
    end
    return
  end
  pend(a, cost, 1)
  if not is_retry then
    a.demanded = a.demanded + cost.prompt + cost.output
  end
  if fingerprint == '0' then
    return
  end
  if shed then
    drop_shed(a, fingerprint, shed.order)
  end
  books.pool.taken = books.pool.taken + 1
  local order = string.format(ORDERED, books.pool.taken)
  write_shed(a, fingerprint, {
    first = books.now, counted_tick = is_retry and -1 or ticks, pending_tick = ticks, order = order,
    prompt = cost.prompt, output = cost.output, kv = cost.kv, concurrency = cost.concurrency,
  })
  call('ZADD', KEY.shed_order, 0, a.no .. ':' .. order .. ':' .. fingerprint)
  a.sheds = a.sheds + 1
  books.pool.sheds = books.pool.sheds + 1
  if a.sheds > MAX_REMEMBERED_SHEDS then
    drop_shed(a, first_shed(a))
  end
end

function account.is_quiet(a)
  return a.in_flight == 0 and a.sheds == 0 and a.demanded == 0 and a.delivered == 0
    and a.pending_tokens == 0 and a.pending_kv == 0 and a.pending_concurrency == 0
    and a.peak_concurrency == 0 and a.peak_kv == 0 and a.sequence_ms == 0 and a.kv_byte_ms == 0
end

-- Whether forgetting this page would lose nothing; drain first.
function account.is_idle(a)
  if a.in_flight > 0 or a.sheds > 0 or a.resting_concurrency ~= 0 or a.expired > 0 then
    return false
  end
  for _, b in ipairs(buckets_of(a)) do
    if b.rate > 0 and b.used > 0 then
      return false
    end
  end
  return true
end

-- The meters since the last tick; new ones start with what is in use.
function account.close_tick(a)
  integrate(a)
  local closed = {
    a.demanded, a.delivered, a.pending_tokens, a.pending_kv, a.pending_concurrency,
    a.peak_concurrency, a.peak_kv, a.sequence_ms, a.kv_byte_ms,
  }
  a.demanded, a.delivered = min(0, a.demanded), min(0, a.delivered)
  a.pending_tokens, a.pending_kv, a.pending_concurrency = 0, 0, 0
  a.peak_concurrency, a.peak_kv = a.concurrency, a.kv
  a.sequence_ms, a.kv_byte_ms = 0, 0
  while a.sheds > 0 do
    local fingerprint, order = first_shed(a)
    if books.now - find_shed(a, fingerprint).first < RETRY_WINDOW_MS then
      break
    end
    drop_shed(a, fingerprint, order)
  end
  return closed
end
