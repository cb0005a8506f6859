-- Starts a turn: truncates the token log, appends the prompt's new tokens, stores the request. Writes a turn again in the
-- same way after the store has lost its beginning or its latest rounds.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string: packed uint32, little-endian)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- KEYS[5] usage records (stream)
-- KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)
-- ARGV[1] owner
-- ARGV[2] epoch
-- ARGV[3] session ttl, ms
-- ARGV[4] tokens of the log to keep
-- ARGV[5] packed tokens to append, or ''
-- ARGV[6] time for which usage records are kept, ms; '0': none is written
-- ARGV[7...] field, value, ...: the request, stored in the meta hash
-- RETURNS {'OK'} | {'LEASE_LOST', epoch of the deletion or nil} | {'SESSION_LOST', tokens in the log}
-- INCLUDES record_turn

if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return { 'LEASE_LOST', redis.call('GET', KEYS[4]) }
end
-- What stands in the log beyond its length, as the last turn and round have it, is left from writes that were lost.
local stored = redis.call('STRLEN', KEYS[2])
local bytes = stored
local now = tostring(redis.call('HGET', KEYS[1], 'turn')) .. ':' .. tostring(redis.call('HGET', KEYS[1], 'round'))
if redis.call('HGET', KEYS[1], 'length_at') == now then
  local sealed = tonumber(redis.call('HGET', KEYS[1], 'length')) * 4
  if sealed < bytes then
    bytes = sealed
  end
end
local kept = tonumber(ARGV[4]) * 4
if bytes < kept then
  return { 'SESSION_LOST', string.format('%.0f', math.floor(bytes / 4)) }
end

local request = { turn = '', round = redis.call('HGET', KEYS[1], 'round') }
local fields = {}
for i = 7, #ARGV do
  fields[#fields + 1] = ARGV[i]
  if i % 2 == 1 then
    request[ARGV[i]] = ARGV[i + 1]
  end
end
local before = redis.call('HMGET', KEYS[1], 'turn', 'request_id', 'usage_ms')
if before[1] ~= request.turn or before[2] ~= request.request_id then
  record_turn() -- of the turn before, which nobody has resumed
  before[3] = false
end
if not before[3] then
  local opened = request_name(request.turn, request.request_id)
  for _, value in ipairs({ 'usage_ms', ARGV[6], 'usage_id', ARGV[2], 'usage_request', opened }) do
    fields[#fields + 1] = value
  end
  if ARGV[6] ~= '0' then
    redis.call('ZADD', KEYS[6], string.format('%.0f', server_ms() + tonumber(ARGV[3])), (open_name()))
  end
end

-- The log is written at positions, and before the one command for the hash. A Redis whose log of writes ends within a
-- transaction loads it without the transaction, and with it once another transaction was written behind it.
if kept == 0 then
  redis.call('DEL', KEYS[2])
elseif stored > kept then
  redis.call('SET', KEYS[2], redis.call('GETRANGE', KEYS[2], 0, kept - 1))
end
if #ARGV[5] > 0 then
  redis.call('SETRANGE', KEYS[2], kept, ARGV[5])
end

-- The last round before this turn is not answered again, so its hash is cleared. `commit` accepts rounds only of a turn
-- that was begun under its own epoch: a store that lost the beginning of a turn, and not the lease before it, still holds
-- the tokens of an older turn.
redis.call('HSET', KEYS[1],
  'begun', ARGV[2],
  'length', string.format('%.0f', (kept + #ARGV[5]) / 4),
  'length_at', request.turn .. ':' .. request.round,
  'chain_hash', '',
  unpack(fields))
if request.finish_reason ~= '0' then -- the store had lost the end of the turn
  record_turn()
end
prolong_session(ARGV[3])
return { 'OK' }
