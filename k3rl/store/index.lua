#!lua
-- One numbered write to the live index; index.py says what the operations promise.
--
-- KEYS  1 generation (hash: token, num_writes, answer)   2 rows (hash: id -> numbers)
--       3 queue (sorted set: id by place)                4 leases (hash: id -> worker)
--       5 workers (sorted set: worker by deadline in ms of the owner's clock)
-- ARGV  1 generation token   2 number of this write   3 operation   4... its arguments
--
-- Returns a list of ids, or nil when the index is not what the owner wrote. A write that arrives
-- twice is answered from the last answer and changes nothing. Lua has no rollback: every check
-- comes before the first change, and the write's number is stored last. The first line makes a
-- server that is out of memory refuse the whole script instead of stopping it half-way.

local held = redis.call('HMGET', KEYS[1], 'token', 'num_writes', 'answer')
local number, last = tonumber(ARGV[2]), tonumber(held[2])
if held[1] ~= ARGV[1] or not last then return false end
if last == number then return cjson.decode(held[3]) end
if last ~= number - 1 then return false end

local operation = {}

-- id, row, id, row, ...
function operation.put()
  for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
end

-- front | back, id...
function operation.push()
  local first = tonumber(redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')[2] or 0)
  local back = tonumber(redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2] or 0)
  local place = ARGV[4] == 'front' and first - (#ARGV - 4) or back + 1
  for i = 5, #ARGV do
    redis.call('HDEL', KEYS[4], ARGV[i])
    redis.call('ZADD', KEYS[3], 'NX', string.format('%.0f', place + i - 5), ARGV[i])
  end
end

-- worker, at most, deadline of a worker that has none
function operation.pop()
  local ids = redis.call('ZRANGE', KEYS[3], 0, tonumber(ARGV[5]) - 1)
  if #ids == 0 then return ids end
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, #ids - 1)
  for _, id in ipairs(ids) do redis.call('HSET', KEYS[4], id, ARGV[4]) end
  redis.call('ZADD', KEYS[5], 'NX', ARGV[6], ARGV[4])
  return ids
end

-- id...
function operation.release()
  for i = 4, #ARGV do redis.call('HDEL', KEYS[4], ARGV[i]) end
end

-- worker, deadline
function operation.renew()
  redis.call('ZADD', KEYS[5], ARGV[5], ARGV[4])
end

-- worker
function operation.take_over()
  local ids, leases = {}, redis.call('HGETALL', KEYS[4])
  for i = 1, #leases, 2 do
    if leases[i + 1] == ARGV[4] then ids[#ids + 1] = leases[i] end
  end
  table.sort(ids)
  for _, id in ipairs(ids) do redis.call('HDEL', KEYS[4], id) end
  redis.call('ZREM', KEYS[5], ARGV[4])
  return ids
end

local answer = operation[ARGV[3]]() or {}
redis.call('HSET', KEYS[1], 'num_writes', ARGV[2], 'answer', cjson.encode(answer))
return answer
