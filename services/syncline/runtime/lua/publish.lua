-- ARGV: trajectory, attempt, number and epoch of the oldest span, then the record's fields.
-- 'published' (also when it was already), 'fenced', or what the ledger says was begun ('number.epoch').
local id, attempt = ARGV[1], tonumber(ARGV[2])
local e = entry_of(id)
if not e or e[ATTEMPT] ~= attempt or e[STATE] ~= 'running' then
  local held = e and (e[RECORD] ~= '' or e[STATE] == 'trained')
  if held and e[ATTEMPT] == attempt then return 'published' end
  count('fenced', 1)
  return 'fenced'
end
if e[NUMBER] ~= tonumber(ARGV[3]) or e[EPOCH] ~= tonumber(ARGV[4]) then
  return e[EPOCH] .. '.' .. e[NUMBER]
end
for i = 5, #ARGV, 2 do
  if ARGV[i] == 'l' then e[SAMPLED] = #ARGV[i + 1] / 4 end
end
e[RECORD] = call('XADD', RECORDS, '*', unpack(ARGV, 5))
call('XACK', WORK, 'rollout', e[WORK_ID])
call('XDEL', WORK, e[WORK_ID])
e[STATE], e[WORK_ID] = 'buffered', ''
keep(id, e)
count('running', -1)
count('buffered', 1)
return 'published'
