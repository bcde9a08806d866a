-- ARGV: trajectories. Removes records and rewards of ended ones; nil, or a story that breaks the law.
local found = {}
for i, id in ipairs(ARGV) do
  local e = entry_of(id)
  if e and (e[STATE] == 'running' or e[STATE] == 'buffered') then return id .. ' is ' .. e[STATE] end
  found[i] = e
end
for i, id in ipairs(ARGV) do
  local e = found[i]
  if e and e[RECORD] ~= '' then
    call('XACK', RECORDS, 'trainer', e[RECORD])
    call('XDEL', RECORDS, e[RECORD])
    e[RECORD] = ''
    keep(id, e)
  end
  call('HDEL', REWARDS, id)
end
return false
