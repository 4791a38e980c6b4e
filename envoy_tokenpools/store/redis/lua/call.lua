--[[
One call: several operations on one pool, in order, all or none.

KEYS:  the pool's, in the order of `KEY_NAMES` of `script.py`.
ARGV:  1 owner, 2 number of the call, 3 the time in ms or -1 for the server's, 4 the channel where owners of leases are told
       to end them, 5 the operations as MessagePack: a list of {name, arguments...}.
Reply: MessagePack of {epoch of the books, list of the operations' replies}.

Books of which something is missing are opened anew before a sweep, so that whatever that breaks is over within a round.

Invariants: a call that is sent again with the same number, because its reply was lost, gets the same reply and changes
nothing. An owner has one call on its way at a time.
]]
request = {owner = ARGV[1], channel = ARGV[4]}

local answered = call('HGET', KEY.replies, request.owner)
if answered then
  answered = unpack_(answered)
  if answered[1] == ARGV[2] then
    return answered[2]
  end
end

books.open(tonumber(ARGV[3]))
local replies, asked = {}, unpack_(ARGV[5])
for _, op in ipairs(asked) do
  if op[1] == 'sweep' and not books.is_new and not books.are_whole() then
    books.reset()
    break
  end
end
for i, op in ipairs(asked) do
  replies[i] = operations[op[1]](op)
end
local reply = pack({books.pool.epoch, replies})
books.close()
if request.has_left then
  call('HDEL', KEY.replies, request.owner)
else
  call('HSET', KEY.replies, request.owner, pack({ARGV[2], reply}))
end
return reply
