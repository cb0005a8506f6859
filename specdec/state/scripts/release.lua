-- Gives a lease back, and notes the epoch that left the session in order; a lease that is not the caller's any more is left alone.
-- A session whose log lacks tokens of the caller's turn, because the store lost them, is not in order.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- ARGV[1] owner
-- ARGV[2] epoch
-- ARGV[3] session ttl, ms
-- ARGV[4] '1': the session is left in order
-- ARGV[5] where its KV is, or ''
-- ARGV[6] tokens that the log must hold to be in order; '0': the caller wrote no turn
-- RETURNS {'OK'}
-- INCLUDES record_turn

if redis.call('GET', KEYS[3]) == ARGV[1] and redis.call('HGET', KEYS[1], 'epoch') == ARGV[2] then
  redis.call('DEL', KEYS[3])
  local has_turn = ARGV[6] == '0'
    or (redis.call('HGET', KEYS[1], 'begun') == ARGV[2] and redis.call('STRLEN', KEYS[2]) >= tonumber(ARGV[6]) * 4)
  if ARGV[4] == '1' and has_turn then
    redis.call('HSET', KEYS[1], 'left', ARGV[2])
  end
  if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[1], 'homes', ARGV[5])
  end
  prolong_session(ARGV[3])
end
return { 'OK' }
