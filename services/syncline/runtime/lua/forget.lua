-- ARGV: trajectories. Removes records and rewards of ended ones; nil, or a story that breaks the law.
local records, kept = {}, {}
for i, e in ipairs(entries_of(ARGV)) do
  if e and (e[STATE] == 'running' or e[STATE] == 'buffered') then return ARGV[i] .. ' is ' .. e[STATE] end
  if e and e[RECORD] ~= '' then
    records[#records + 1] = e[RECORD]
    e[RECORD] = ''
    kept[#kept + 1], kept[#kept + 2] = ARGV[i], pack(e)
  end
end
each('XDEL', RECORDS, records)
each('HSET', ENTRIES, kept)
each('HDEL', HELD, ARGV)
each('HDEL', REWARDS, ARGV)
return false
