-- Appends the tokens of one round or of several consecutive ones, once.
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
-- ARGV[4] id of the first round
-- ARGV[5] tokens in the log when it started
-- ARGV[6] packed tokens of the rounds, or ''
-- ARGV[7] statistics, JSON
-- ARGV[8] finish reason, '0' while the request runs
-- ARGV[9] chain hash of the log with these rounds, in hexadecimal digits; not ''
-- ARGV[10] number of rounds
-- RETURNS 'OK' (a status, the shortest answer there is) | {'LEASE_LOST', epoch of the deletion or nil}
--   | {'SESSION_LOST', tokens in the log of this turn: 0 if the store lost the turn's beginning}
-- INCLUDES record_turn

local meta = redis.call('HMGET', KEYS[1], 'epoch', 'begun', 'round', 'length', 'turn', 'chain_hash')
if redis.call('GET', KEYS[3]) ~= ARGV[1] or meta[1] ~= ARGV[2] then
  return { 'LEASE_LOST', redis.call('GET', KEYS[4]) }
end

if meta[2] ~= ARGV[2] then
  return { 'SESSION_LOST', '0' }
end

local expected = tonumber(meta[3] or '0')
local round = tonumber(ARGV[4])
local next_round = string.format('%.0f', round + tonumber(ARGV[10]))
local base = tonumber(ARGV[5])
local bytes = redis.call('STRLEN', KEYS[2])
local sealed = tonumber(meta[4]) * 4
if sealed < bytes then -- what stands beyond it is left from writes that were lost
  bytes = sealed
end
local function lost()
  return { 'SESSION_LOST', string.format('%.0f', math.floor(bytes / 4)) }
end

if round < expected then
  -- The hash is that of the whole log, so an equal one means the same rounds with the same tokens. A new turn clears it.
  if next_round ~= meta[3] or meta[6] ~= ARGV[9] then
    return { 'LEASE_LOST' }
  end
  if bytes < base * 4 + #ARGV[6] then
    return lost()
  end
  return redis.status_reply('OK')
end

if bytes < base * 4 then
  return lost()
end
if bytes > base * 4 or round > expected then
  return { 'LEASE_LOST' }
end

if #ARGV[6] > 0 then
  redis.call('SETRANGE', KEYS[2], base * 4, ARGV[6])
end
redis.call('HSET', KEYS[1],
  'round', next_round,
  'length', string.format('%.0f', base + #ARGV[6] / 4),
  'length_at', meta[5] .. ':' .. next_round,
  'chain_hash', ARGV[9],
  'stats_json', ARGV[7],
  'finish_reason', ARGV[8])
if ARGV[8] ~= '0' then
  record_turn()
end
prolong_session(ARGV[3])
return redis.status_reply('OK')
