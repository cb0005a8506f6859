-- Appends one round's tokens, once.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string: packed uint32, little-endian)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- ARGV[1] owner
-- ARGV[2] epoch
-- ARGV[3] session ttl, ms
-- ARGV[4] round id
-- ARGV[5] tokens in the log when the round started
-- ARGV[6] packed tokens of the round, or ''
-- ARGV[7] statistics, JSON
-- ARGV[8] finish reason, '0' while the request runs
-- ARGV[9] chain hash of the log with this round, in hexadecimal digits
-- RETURNS 'OK' (a status, the shortest answer there is) | {'LEASE_LOST', epoch of the deletion or nil}
--   | {'SESSION_LOST', tokens in the log of this turn: 0 if the store lost the turn's beginning}

if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return { 'LEASE_LOST', redis.call('GET', KEYS[4]) }
end

if redis.call('HGET', KEYS[1], 'begun') ~= ARGV[2] then
  return { 'SESSION_LOST', '0' }
end

local expected = tonumber(redis.call('HGET', KEYS[1], 'round') or '0')
local round = tonumber(ARGV[4])
local base = tonumber(ARGV[5])
local bytes = redis.call('STRLEN', KEYS[2])
local sealed = tonumber(redis.call('HGET', KEYS[1], 'length')) * 4
if sealed < bytes then -- what stands beyond it is left from writes that were lost
  bytes = sealed
end
local lost = { 'SESSION_LOST', string.format('%.0f', math.floor(bytes / 4)) }

if round < expected then
  local same = round == expected - 1
    and redis.call('HGET', KEYS[1], 'commit_base') == ARGV[5]
    and redis.call('HGET', KEYS[1], 'commit_count') == string.format('%.0f', #ARGV[6] / 4)
  if not same then
    return { 'LEASE_LOST' }
  end
  if bytes < base * 4 + #ARGV[6] then
    return lost
  end
  if #ARGV[6] > 0 and redis.call('GETRANGE', KEYS[2], base * 4, base * 4 + #ARGV[6] - 1) ~= ARGV[6] then
    return { 'LEASE_LOST' }
  end
  return redis.status_reply('OK')
end

if bytes < base * 4 then
  return lost
end
if bytes > base * 4 or round > expected then
  return { 'LEASE_LOST' }
end

if #ARGV[6] > 0 then
  redis.call('SETRANGE', KEYS[2], base * 4, ARGV[6])
end
redis.call('HSET', KEYS[1],
  'round', string.format('%.0f', round + 1),
  'length', string.format('%.0f', base + #ARGV[6] / 4),
  'length_at', redis.call('HGET', KEYS[1], 'turn') .. ':' .. string.format('%.0f', round + 1),
  'chain_hash', ARGV[9],
  'commit_base', ARGV[5],
  'commit_count', string.format('%.0f', #ARGV[6] / 4),
  'stats_json', ARGV[7],
  'finish_reason', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return redis.status_reply('OK')
