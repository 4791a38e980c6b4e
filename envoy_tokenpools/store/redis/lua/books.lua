--[[
The books of one pool in memory for the length of one call: read when first needed, written once at the end.

`books.pool` is the pool's page, `books.now` pool time in milliseconds. Pool time follows the server's clock but never
steps: it stands still while that runs backwards, and moves by at most MAX_STEP_MS at once, so that neither a corrected
clock nor a failover to another machine expires leases. A caller may hand in the time instead (tests, simulation).

Invariants: what is in use is the sum of the live leases; no counter is ever negative; the number of leases is `in_flight`.
Numbers are integers below 2^53, but for weights.
]]
local books = {pool = nil, now = 0, is_new = false}

local accounts, changed = {}, {}

local function new_generation()
  return {span = 0, inside = {}, first = {-1, 0, ''}, second = {-1, 0, ''}}
end

local function new_pool(now, wall)
  local t = call('TIME')
  return {
    epoch = t[1] .. '.' .. t[2], now = now, wall = wall,
    taken = 0, ticks = 0, tick_at = now, opened = 0,
    accounts = 0, active = 0, evictable = 0, sheds = 0, expired = 0, rests = 0, standings = 0,
    in_flight = 0, concurrency = 0, kv = 0,
    tokens = bucket.new(0, 0, now),
    usable = {0, 0, 0}, best_rate = 0, published = false,
    withheld_rate = 0, withheld_sequences = 0, withheld_kv = 0,
    freeing_leases = 0, freeing_concurrency = 0, freeing_kv = 0,
    away = 0,
    refusals = {since = 0, current = new_generation(), last = new_generation()},
    number = 0, version = 0, replaced_at = 0, degraded = false, digest = '',
    config = 0, config_in_force = 0, fence = 0, strangers = 0,
  }
end

function books.new_generation()
  return new_generation()
end

-- Read the pool's page; `given` is the time, or -1 for the server's own.
function books.open(given)
  local t = call('TIME')
  local wall = t[1] * 1000 + floor(t[2] / 1000)
  local page = call('GET', KEY.pool)
  if page then
    local pool = unpack_(page)
    books.now = given >= 0 and given or pool.now + min(max(0, wall - pool.wall), MAX_STEP_MS)
    pool.now, pool.wall = books.now, wall
    books.pool = pool
  else
    call('DEL', unpack(KEYS)) -- nothing else is worth anything without it
    books.now = given >= 0 and given or wall
    books.pool = new_pool(books.now, wall)
    books.is_new = true
  end
end

-- Whether nothing is missing: a server short of memory may have dropped some of the keys.
function books.are_whole()
  local pool = books.pool
  return call('HLEN', KEY.accounts) == pool.accounts
    and call('HLEN', KEY.leases) == pool.in_flight
    and call('ZCARD', KEY.expiry) == pool.in_flight
    and call('ZCARD', KEY.taken) == pool.in_flight
    and call('ZCARD', KEY.held) == pool.in_flight
    and call('ZCARD', KEY.evictable) == pool.evictable
    and call('ZCARD', KEY.freeing) == pool.freeing_leases
    and call('SCARD', KEY.active) == pool.active
    and call('HLEN', KEY.standings) == pool.standings
    and call('ZCARD', KEY.versions) == pool.standings
    and call('HLEN', KEY.expired) == pool.expired
    and call('ZCARD', KEY.expired_order) == pool.expired
    and call('HLEN', KEY.sheds) == pool.sheds
    and call('ZCARD', KEY.shed_order) == pool.sheds
    and call('HLEN', KEY.away) == pool.away
    and call('LLEN', KEY.rests) == pool.rests
end

-- Begin anew, as if nothing had ever been written: what is left of damaged books would never end.
function books.reset()
  call('DEL', unpack(KEYS))
  accounts, changed = {}, {}
  books.pool = new_pool(books.now, books.pool.wall)
end

-- The page of an entitlement; nil if it has none.
function books.find(name)
  local account = accounts[name]
  if account == nil then
    local page = call('HGET', KEY.accounts, name)
    account = page and unpack_(page) or false
    accounts[name] = account
  end
  return account or nil
end

function books.add(account)
  books.pool.opened = books.pool.opened + 1
  books.pool.accounts = books.pool.accounts + 1
  books.pool.strangers = books.pool.strangers + 1
  account.no = string.format('%012.0f', books.pool.opened)
  accounts[account.name] = account
  changed[account.name] = account
end

-- Whether what was published is in force for it.
function books.set_published(account, published)
  if account.published ~= published then
    account.published = published
    books.pool.strangers = books.pool.strangers + (published and -1 or 1)
  end
  changed[account.name] = account
end

-- To be called whenever a page is changed.
function books.change(account)
  changed[account.name] = account
end

-- The same where something happened that a tick has to look at.
function books.happen(account)
  changed[account.name] = account
  if not account.active then
    account.active = true
    books.pool.active = books.pool.active + 1
    call('SADD', KEY.active, account.name)
  end
end

-- Nothing happens there any more.
function books.rest(account)
  if account.active then
    account.active = false
    books.pool.active = books.pool.active - 1
    call('SREM', KEY.active, account.name)
  end
end

-- An entitlement that nothing was published of.
function books.remove(account)
  books.pool.accounts = books.pool.accounts - 1
  books.pool.strangers = books.pool.strangers - 1
  books.rest(account)
  accounts[account.name] = false
  changed[account.name] = nil
  call('HDEL', KEY.accounts, account.name)
end

function books.close()
  local pairs_, n = {}, 0
  for name, account in pairs(changed) do
    pairs_[n + 1], pairs_[n + 2] = name, pack(account)
    n = n + 2
    if n >= 1000 then
      call('HSET', KEY.accounts, unpack(pairs_))
      pairs_, n = {}, 0
    end
  end
  if n > 0 then
    call('HSET', KEY.accounts, unpack(pairs_))
  end
  call('SET', KEY.pool, pack(books.pool))
end
