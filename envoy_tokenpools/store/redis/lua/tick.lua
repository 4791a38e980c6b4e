--[[
open: a replica has loaded a configuration of the pool.

Arguments: its fingerprint.
Reply:     {number of the configuration, fence or -1, leads}. A replica that leads has to publish.

close_tick: the meters since the last tick, for the replica that leads; mirrors `Ledger.close_tick`.

Arguments: number of the caller's configuration, ms that the tick must have lasted.
Reply:     {fence, elapsed ms, list of {entitlement, meters}}, or false if another leads or the tick is too young.

publish: put the outcome of a tick in force; mirrors `Ledger.publish`.

Arguments: fence (-1: of whoever comes first), number of the tick, version that it changes (-1: replaces whatever there
           is) and the epoch of the books that it is of, configuration's fingerprint, usable, window, degraded, list of
           {entitlement, what others read of it, terms or false if they are as before}.
Reply:     its version, 'fenced' if another leads, or 'stale' if what it changes is not in force.

look: what is new to a replica.

Arguments: version that it knows, and the epoch of the books that it is of.
Reply:     {version, {number, usable, degraded, replaces everything, what to read} or false, ids of its leases that
           are to be ended, replicas}.

leave: a replica ends, and need not be waited for. Its leases stay.

Arguments: none.
Reply:     true.

KEY.standings maps an entitlement to what others read of it, KEY.versions to the version that changed it last.

Invariants: one replica leads at a time, for LEAD_MS from its last sign of life, and its fence is the highest; the
configuration that was loaded last leads;
meters are read once; nobody but the leader publishes.
]]
local function lead(config)
  local pool = books.pool
  if pool.leader ~= request.owner then
    pool.fence = pool.fence + 1
  end
  pool.leader, pool.leader_config, pool.leads_until = request.owner, config, books.now + LEAD_MS
end

operations.open = function(op)
  local pool, fingerprint = books.pool, op[2]
  if pool.published and pool.digest == fingerprint then
    return {pool.config_in_force, -1, false}
  end
  pool.config = pool.config + 1
  lead(pool.config)
  return {pool.config, pool.fence, true}
end

local function may_lead(config)
  local pool = books.pool
  if not pool.leader or pool.leader == request.owner or config > pool.leader_config then
    return true
  end
  local grace = config < pool.leader_config and LEAD_MS or 0
  return books.now >= pool.leads_until + grace
end

operations.close_tick = function(op)
  local pool = books.pool
  if books.now - pool.tick_at < op[3] or not may_lead(op[2]) then
    return false
  end
  lead(op[2])
  local elapsed = books.now - pool.tick_at
  pool.tick_at = books.now
  withheld.end_rests()
  local meters = {}
  for _, name in ipairs(call('SMEMBERS', KEY.active)) do
    local a = books.find(name)
    meters[#meters + 1] = {name, account.close_tick(a)}
    books.change(a)
    if a.published or a.expired > 0 then
      if account.is_quiet(a) then
        books.rest(a)
      end
    else
      account.drain(a)
      if account.is_idle(a) then
        terms.apply(a, terms.withdrawn(a.terms), 0)
        books.remove(a)
      end
    end
  end
  pool.ticks = pool.ticks + 1
  return {pool.fence, elapsed, meters}
end

-- Whoever is not among those that were published withholds nothing, and is forgotten when it is idle.
local function withdraw_others(entries, window)
  local named = {}
  for _, entry in ipairs(entries) do
    named[entry[1]] = true
  end
  for _, name in ipairs(call('HKEYS', KEY.accounts)) do
    local a = not named[name] and books.find(name)
    if a then
      books.set_published(a, false)
      terms.agree(a, terms.withdrawn(a.terms), window)
      books.happen(a)
    end
  end
  call('DEL', KEY.standings, KEY.versions)
  books.pool.standings = 0
end

local function withdraw_strangers(window)
  if books.pool.strangers == 0 then
    return
  end
  for _, name in ipairs(call('SMEMBERS', KEY.active)) do
    local a = books.find(name)
    if not a.published then
      terms.agree(a, terms.withdrawn(a.terms), window)
    end
  end
end

operations.publish = function(op)
  local pool, fence, number, base, epoch, window, entries = books.pool, op[2], op[3], op[4], op[5], op[8], op[10]
  if pool.leader and (pool.leader ~= request.owner or (fence >= 0 and fence ~= pool.fence)) then
    return 'fenced'
  end
  if base >= 0 and (base ~= pool.version or epoch ~= pool.epoch or window ~= pool.tokens.window) then
    return 'stale'
  end
  pool.version = pool.version + 1
  if base < 0 then
    withdraw_others(entries, window)
    pool.replaced_at = pool.version
  else
    withdraw_strangers(window)
  end
  for _, entry in ipairs(entries) do
    local name, offered = entry[1], entry[3]
    pool.standings = pool.standings + call('HSET', KEY.standings, name, entry[2])
    call('ZADD', KEY.versions, pool.version, name)
    if offered then
      local wanted = terms.read(offered)
      local a = terms.open(name, wanted, window)
      books.set_published(a, true)
      terms.agree(a, wanted, window)
    end
  end
  terms.set_usable(op[7], window)
  pool.number, pool.digest, pool.degraded, pool.published = number, op[6], op[9], true
  pool.config_in_force = pool.leader_config or pool.config
  return pool.version
end

local function count_replicas()
  local gone = call('ZRANGEBYSCORE', KEY.owners, '-inf', books.now - OWNER_TTL_MS)
  for _, owner in ipairs(gone) do
    call('ZREM', KEY.owners, owner)
    call('HDEL', KEY.replies, owner)
  end
  call('ZADD', KEY.owners, books.now, request.owner)
  return call('ZCARD', KEY.owners)
end

local function news_since(known)
  local pool = books.pool
  local is_whole = known < pool.replaced_at or known > pool.version
  local names = call('ZRANGEBYSCORE', KEY.versions, is_whole and '-inf' or '(' .. known, '+inf')
  local standings = {}
  for first = 1, #names, 1000 do
    local some = call('HMGET', KEY.standings, unpack(names, first, min(first + 999, #names)))
    for _, standing in ipairs(some) do
      standings[#standings + 1] = standing
    end
  end
  return {pool.number, pool.usable, pool.degraded, is_whole, standings}
end

operations.look = function(op)
  local pool, known, evicted = books.pool, op[2], {}
  if op[3] ~= pool.epoch then
    known = -1
  end
  if pool.leader == request.owner then
    pool.leads_until = books.now + LEAD_MS
  end
  if pool.freeing_leases > 0 then
    local mine = '[' .. request.owner .. ':'
    for _, member in ipairs(call('ZRANGEBYLEX', KEY.freeing, mine, '(' .. request.owner .. ';')) do
      evicted[#evicted + 1] = member:sub(#mine)
    end
  end
  local is_news = pool.published and pool.version ~= known
  return {pool.version, is_news and news_since(known), evicted, count_replicas()}
end

operations.leave = function()
  local pool = books.pool
  if pool.leader == request.owner then
    pool.leads_until = books.now
  end
  call('ZREM', KEY.owners, request.owner)
  request.has_left = true
  return true
end
