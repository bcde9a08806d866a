-- ARGV: trajectories. Removes records and rewards of ended ones; nil, or a story that breaks the law.
local records, kept, none = {}, {}, pack('')
for i, line in ipairs(lines_of(ARGV)) do
  local state = line and field_of(line, STATE)
  if state == 'running' or state == 'buffered' then return ARGV[i] .. ' is ' .. state end
  local record = line and field_of(line, RECORD) or ''
  if record ~= '' then
    records[#records + 1] = record
    kept[#kept + 1], kept[#kept + 2] = ARGV[i], line_with(line, RECORD, none)
  end
end
each('XDEL', RECORDS, records)
each('HSET', ENTRIES, kept)
each('HDEL', HELD, ARGV)
each('HDEL', REWARDS, ARGV)
return false
