-- Reads where a stream of usage records begins.
--
-- KEYS[1] usage records (stream)
-- RETURNS {} | {id of the first record, number of records that were trimmed}

if redis.call('EXISTS', KEYS[1]) == 0 then
  return {}
end
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)
if #first == 0 then
  return {}
end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
local added = 0
for i = 1, #info, 2 do
  if info[i] == 'entries-added' then
    added = info[i + 1]
  end
end
return { first[1][1], math.max(0, added - redis.call('XLEN', KEYS[1])) }
