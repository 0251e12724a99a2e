// Device time: the accounts of each pool.

import {about, heading, note, notKept} from './blocks.js';
import {partsBar} from './charts.js';
import {colorOf, DATA, shownName, shownRows} from './data.js';
import {plural} from './format.js';
import {table} from './table.js';

export function devicesSection() {
  const rows = shownRows('bubble_ledger');
  if (!rows.length) return [about(`No step finished in ${shownName()}.`), ...notKept()];
  const pools = [...new Set(rows.map((row) => row.pool))];
  return [
    about(
      `What the devices did in ${shownName()}, from the start of a step to that of the next: each ` +
        'second of each device is in exactly one account.',
    ),
    ...pools.flatMap((pool) =>
      poolBlocks(
        pool,
        rows.filter((row) => row.pool === pool),
      ),
    ),
    note('Concurrent calls of a replica share its time evenly.'),
  ];
}

/**
 * @param {string} pool
 * @param {LedgerRow[]} rows
 */
function poolBlocks(pool, rows) {
  const whole = rows.reduce((sum, row) => sum + row.device_s, 0);
  const sums = new Map(Object.keys(DATA.accounts).map((account) => [account, 0]));
  for (const row of rows) sums.set(row.account, (sums.get(row.account) ?? 0) + row.device_s);
  const spent = [...sums]
    .filter(([, seconds]) => seconds > 0)
    .map(([account, seconds]) => ({
      account: account.replaceAll('_', ' '),
      color: colorOf(`account:${account}`),
      device_s: seconds,
      share: seconds / whole,
      what: DATA.accounts[account],
    }));
  const title = `${plural(rows[0].devices, 'device')} ${DATA.pools[pool]}`;
  return [
    heading(title),
    partsBar(spent.map(({account, device_s, color}) => ({name: account, value: device_s, color}))),
    table({
      caption: `Device time, ${title}`,
      rows: spent,
      limit: 16,
      columns: [
        ['account', 'account', 'text'],
        ['share', 'share', 'share'],
        ['device_s', 'device time', 's', {bar: true, color: (row) => row.color}],
        ['what', 'what', 'text'],
      ],
    }),
  ];
}
